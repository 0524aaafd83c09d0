"""For tests of programs that use Ronde, and of Ronde itself: real processes, real hosts, real faults.

- `ronde.testing.ranks`: runs a function on n ranks and returns their results.
- `ronde.testing.hosts`: network namespaces that stand for hosts (needs root and `ip`).
- `ronde.testing.faults`: kills, stops and resumes a rank.
- `ronde.testing.linearizability`: whether what concurrent clients saw of a store can be explained.
"""

from __future__ import annotations
