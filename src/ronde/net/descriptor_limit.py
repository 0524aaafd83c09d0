"""How many file descriptors this process may have: the soft limit, low for the sake of old programs, is raised."""

from __future__ import annotations

import os
import resource

from ronde.errors import UsageError

__all__ = ["make_room", "raise_descriptor_limit"]

MOST = 21_000  # a store's clients and what else a process has
SPARE = 64  # for what the program itself opens while we connect


def raise_descriptor_limit() -> bool:
    """Allow this process enough descriptors, or what it may have; return whether that is more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MOST, hard)
    if soft >= wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


def make_room(count: int, purpose: str) -> None:
    """Allow this process `count` descriptors more than it has open now, which `purpose` needs.

    Raises UsageError if the hard limit forbids it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    is_open = len(os.listdir("/proc/self/fd"))
    needed = is_open + count
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{purpose} needs {count} file descriptors in this process, which has {is_open} open and may have {hard}: "
            f"raise the hard limit (ulimit -Hn) to {needed + SPARE} or more, or use fewer ranks"
        )
    wanted = needed + SPARE if hard == resource.RLIM_INFINITY else min(needed + SPARE, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
