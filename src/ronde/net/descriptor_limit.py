"""Raises the soft limit of this process's file descriptors, which is low by default for the sake of old programs."""

from __future__ import annotations

import resource

__all__ = ["raise_descriptor_limit"]

MOST = 21_000  # a store's clients and what else a process has


def raise_descriptor_limit() -> bool:
    """Allow this process enough descriptors, or what it may have; return whether that is more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MOST, hard)
    if soft >= wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True
