"""How much memory this process may still take: what the machine, its control group and its own limit leave."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_memory"]


def available_memory(root: Path = Path("/")) -> int:
    """Return how many bytes this process can take before the kernel refuses or kills. `root`: of the file system."""
    left = [_left_of_machine(root), *_left_of_groups(root), *_left_of_addresses(root)]
    return max(0, min(left))


def _left_of_machine(root: Path) -> int:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _left_of_groups(root: Path) -> Iterator[int]:
    """Yield what the control group of this process (version 2), and those above it, leave."""
    top = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = line.partition("0::")[2].strip("/")
            for folder in (top / path, *(top / path).parents):
                if folder.is_relative_to(top):
                    with suppress(OSError, ValueError):  # no limit here, which may be the text "max"
                        limit = int((folder / "memory.max").read_text())
                        yield limit - int((folder / "memory.current").read_text()) + _cached(folder)


def _cached(group: Path) -> int:
    """Return how many bytes of files the kernel keeps for a group, and gives up first."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return next((int(words[1]) for words in lines if words[0] == "inactive_file"), 0)


def _left_of_addresses(root: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield limit - pages * os.sysconf("SC_PAGE_SIZE")
