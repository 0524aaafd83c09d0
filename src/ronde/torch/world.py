"""`init` and `join` with Horovod's arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ronde.comm.world import has_joined, size
from ronde.engine import process
from ronde.engine.process_sets import ProcessSet
from ronde.errors import UsageError

__all__ = ["init", "join"]


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
    **how: Any,
) -> None:
    """Join the world: connect this process with all other ranks of the job, and start the engine.

        hvd.init()
        print("rank", hvd.rank(), "of", hvd.size())

    All ranks call it, before any other function. It returns when all have joined; a second call does nothing.

    Args:
        comm: the list of all ranks, or None. For some of the ranks, use process sets.
        process_sets: process sets, or lists of their ranks, to add (None or "dynamic": none yet).
        how: arguments of `ronde.init`: `rank`, `size`, `store`, `init_method` and settings.

    Raises:
        UsageError: an argument or variable is invalid.
        TimeoutError: ranks are missing after `start_timeout_ns` (default: 300 s); the error names them.
        AuthenticationError: another rank has another job key.
    """
    wanted = None if comm is None else _ranks(comm)
    was_initialized = has_joined()
    process.init(process_sets=process_sets, **how)
    if wanted and sorted(wanted) != list(range(size())):
        there = size()
        if not was_initialized:
            process.shutdown()
        raise UsageError(
            f"comm={wanted} are not all {there} ranks that were started: for some of them make a process set, "
            f"hvd.init(process_sets=[hvd.ProcessSet({wanted})])"
        )


def join(device: int = -1) -> int:
    """Wait, without data, until all ranks have called `join`; return the last rank that called it, on all ranks.

        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)

    Until then this rank contributes zeros to the operations of the other ranks, so that their optimizers continue. Its
    own parameters do not change.

    Args:
        device: has no effect; Horovod's scripts pass it.

    Raises:
        UsageError: another thread has called it.
        PeerLostError: a rank died, left or cannot be reached.
    """
    operator.index(device)
    return process.join()


def _ranks(comm: object) -> list[int]:
    try:
        return [operator.index(rank) for rank in comm]  # type: ignore[attr-defined]
    except TypeError:
        raise UsageError(
            f"comm must be a list of ranks or None, not {comm!r}: the ranks are those that were started together"
        ) from None
