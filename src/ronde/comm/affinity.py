"""Which core our own threads run on: the engine's and each watch's, by the setting `thread_affinity`.

A new thread inherits the affinity of the one that starts it. So that one is pinned for just this moment, and nobody has
to tell the native threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ronde.errors import UsageError
from ronde.net.host import host_name

__all__ = ["core_of", "starting_threads_on"]


def core_of(cores: Sequence[int] | None, local_rank: int, local_size: int) -> int | None:
    """Return the core of a rank, None if none is wanted.

    Raises UsageError, on all ranks of the host alike, if there are fewer cores than ranks or one of them is not there.
    """
    if cores is None:
        return None
    shown = ",".join(map(str, cores))
    if len(cores) < local_size:
        raise UsageError(
            f"thread_affinity={shown} names {len(cores)} cores, but {local_size} ranks are on host {host_name()}: name "
            "one for each"
        )
    for rank, core in enumerate(cores[:local_size]):
        try:
            with starting_threads_on(core):
                pass
        except (OSError, OverflowError):
            raise UsageError(
                f"thread_affinity={shown}: core {core}, of local rank {rank}, does not exist on host {host_name()} or "
                f"may not be used; this process runs on {', '.join(map(str, sorted(os.sched_getaffinity(0))))}"
            ) from None
    return cores[local_rank]


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
