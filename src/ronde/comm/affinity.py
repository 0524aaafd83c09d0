"""Chooses the core for Ronde's own threads, by the setting `thread_affinity`.

A new thread inherits the affinity of the one that starts it. So that one is pinned for just this moment, and nobody has
to tell the native threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from ronde.errors import UsageError
from ronde.net.host import host_name
from ronde.process.process_groups import usable_core_numbers

__all__ = ["core_of", "starting_threads_on"]


def core_of(cores: Sequence[int] | None, local_rank: int, local_size: int) -> int | None:
    """Return the core of a rank, None if none is wanted, or if there are fewer than ranks, which is said once.

    Raises UsageError, on all ranks of the host alike, if a core is not there.
    """
    if cores is None:
        return None
    shown = ",".join(map(str, cores))
    if len(cores) < local_size:
        # No error: horovodrun takes one number only, so its users' files have one, whatever the number of ranks.
        if local_rank == 0:
            _warn(
                f"thread_affinity={shown} means nothing: it names {len(cores)} of {local_size} cores, one for each "
                f"rank on host {host_name()}"
            )
        return None
    for rank, core in enumerate(cores[:local_size]):
        try:
            with starting_threads_on(core):
                pass
        except (OSError, OverflowError):
            raise UsageError(
                f"thread_affinity={shown}: core {core}, of local rank {rank}, does not exist on host {host_name()} or "
                f"may not be used; this process runs on {', '.join(map(str, sorted(usable_core_numbers())))}"
            ) from None
    return cores[local_rank]


@cache
def _warn(text: str) -> None:
    """Say it, for the first time: every communicator asks for its core."""
    logging.getLogger(__name__).warning(text)


@contextmanager
def starting_threads_on(core: int | None) -> Iterator[None]:
    """Threads that are started within it, by this thread, run on the core. Raises OSError if there is none."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
