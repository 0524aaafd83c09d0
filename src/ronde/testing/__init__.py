"""Tools for tests of programs that use Ronde: real processes, real hosts, real faults.

- `ronde.testing.ranks`: runs a function on n ranks and returns their results.
- `ronde.testing.hosts`: network namespaces that stand for hosts (needs root and `ip`).
- `ronde.testing.faults`: kills, stops and resumes a rank.
"""

from __future__ import annotations
