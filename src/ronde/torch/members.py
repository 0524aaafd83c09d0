"""Which ranks take part in an operation of `ronde.torch`: all of them, or a process set."""

from __future__ import annotations

from ronde.comm.world import rank, size
from ronde.engine.process import global_process_set
from ronde.engine.process_sets import ProcessSet
from ronde.errors import UsageError

__all__ = ["is_member", "place_in", "size_of"]


def size_of(process_set: ProcessSet | None) -> int:
    """Return the number of ranks that take part. Raises as `place_in`, but not on ranks outside the set."""
    return size() if _is_world(process_set) else _checked(process_set).size()


def place_in(process_set: ProcessSet | None) -> int:
    """Return this rank's place among those that take part.

    Raises NotInitializedError before `init`, UsageError if `process_set` is not a set, not added, or without this rank.
    """
    return rank() if _is_world(process_set) else _checked(process_set).rank()


def is_member(process_set: ProcessSet | None) -> bool:
    """Return whether this rank takes part. Raises as `size_of`."""
    return _is_world(process_set) or _checked(process_set).included()


def _is_world(process_set: ProcessSet | None) -> bool:
    return process_set is None or process_set is global_process_set


def _checked(process_set: object) -> ProcessSet:
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"process_set must be a ProcessSet, not {process_set!r}")
    return process_set
