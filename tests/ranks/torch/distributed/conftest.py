"""The tests in this folder need PyTorch."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
if find_spec("torch") and tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 8):
    collect_ignore_glob = ["test_shards.py"]  # FSDP2 does not run on CPUs
