"""Raises this process's soft limit of file descriptors, which is low for the sake of old programs."""

from __future__ import annotations

import os
import resource

from ronde.errors import UsageError

__all__ = ["make_room", "raise_descriptor_limit"]

MOST = 21_000  # a store's clients and the other descriptors of a process
SPARE = 64  # for files that the program opens meanwhile


def raise_descriptor_limit() -> bool:
    """Raise the limit to enough descriptors, or to the hard limit; return whether it has risen."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MOST, hard)
    if soft >= wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


def make_room(count: int, purpose: str) -> None:
    """Raise the limit so that the process can open `count` more descriptors, which `purpose` needs.

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
