"""Chooses the core for Ronde's own threads, by the setting `thread_affinity`.

A new thread inherits the affinity of the thread that starts it. So Ronde pins the starting thread for just this moment;
the native threads need no code for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from ronde.errors import UsageError
from ronde.net.host import host_name
from ronde.process.resources import usable_core_numbers

__all__ = ["core_of", "starting_threads_on"]


def core_of(cores: Sequence[int] | None, local_rank: int, local_size: int) -> int | None:
    """Return the core of a rank. None if `cores` is None, or names fewer cores than the host has ranks (a warning).

    Raises UsageError, on all ranks of the host alike, if this process may not run on a core.
    """
    if cores is None:
        return None
    shown = ",".join(map(str, cores))
    if len(cores) < local_size:
        # No error: horovodrun accepts a single number, so scripts for it set one, whatever the number of ranks.
        if local_rank == 0:
            _warn_once(
                f"thread_affinity={shown} has no effect on host {host_name()}, which has {local_size} ranks: expected "
                f"{local_size} cores, one for each rank, not {len(cores)}"
            )
        return None
    for rank, core in enumerate(cores[:local_size]):
        try:
            with starting_threads_on(core):
                pass
        except (OSError, OverflowError):
            raise UsageError(
                f"thread_affinity={shown}: local rank {rank} cannot use core {core} of host {host_name()}; this "
                f"process may run on the cores {', '.join(map(str, sorted(usable_core_numbers())))}"
            ) from None
    return cores[local_rank]


@cache
def _warn_once(text: str) -> None:
    """Log the warning, but only the first time: every communicator asks for its core."""
    logging.getLogger(__name__).warning(text)


@contextmanager
def starting_threads_on(core: int | None) -> Iterator[None]:
    """Run the threads that this thread starts within the block on the core. Raises OSError if that is impossible."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
