"""Rank and size as functions, as scripts for other frameworks expect them.

They return the properties of the world's `Communicator`. In a forked child, such as a worker of a DataLoader, they
return those of its parent, so that the worker can choose its rank's part of the data.
"""

from __future__ import annotations

from ronde.comm.world import world_of_parent

__all__ = ["cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"]


def rank() -> int:
    """Return the rank of this process, from 0 to size() - 1. Raises NotInitializedError before `init`."""
    return world_of_parent().rank


def size() -> int:
    """Return the number of processes. Raises NotInitializedError before `init`."""
    return world_of_parent().size


def local_rank() -> int:
    """Return the rank of this process among those of its host. Raises NotInitializedError before `init`."""
    return world_of_parent().local_rank


def local_size() -> int:
    """Return the number of processes of this host. Raises NotInitializedError before `init`."""
    return world_of_parent().local_size


def cross_rank() -> int:
    """Return the number of this host among those that have a process with this local rank.

    Raises NotInitializedError before `init`.
    """
    return world_of_parent().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank. Raises NotInitializedError before `init`."""
    return world_of_parent().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes. Raises NotInitializedError before `init`."""
    return world_of_parent().is_homogeneous
