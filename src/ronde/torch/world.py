"""The world as `horovod.torch` enters it, and how a rank says that it has run out of data."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ronde.comm.queries import size
from ronde.comm.world import has_joined
from ronde.engine import process
from ronde.engine.process_sets import ProcessSet
from ronde.errors import UsageError

__all__ = ["init", "join"]


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
    **how: Any,
) -> None:
    """Join the world; returns when all ranks have joined. All ranks call it; a second call does nothing.

    `comm`: the list of all ranks, or None; to work with some of them there are process sets. `process_sets`: added at
    once; the word "dynamic" stands for none, as more can be added at any time. `how`: what `ronde.init` takes, too.
    Raises UsageError for other values, and what `ronde.init` raises.
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
    """Say that this rank has run out of data; return the rank that was the last to say so, once all have.

    Meanwhile this rank takes part in what the others submit, with zeros (see `ronde.join`), so that their optimizers go
    on; its own parameters stay as they are. `device`: as scripts for Horovod pass it; it does not matter here.
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
