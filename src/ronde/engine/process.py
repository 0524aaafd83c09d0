"""The engine of this process: begins with `init`, ends with `shutdown`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any

from ronde import settings
from ronde._native import Handle
from ronde.comm import world as comm
from ronde.engine.engine import Engine
from ronde.errors import NotInitializedError
from ronde.types import Kind, ReduceOp, Sum

__all__ = ["engine", "init", "prepare", "shutdown", "start_timeline", "stop_timeline", "submit"]


class _Process:
    """What this process has; one instance, below."""

    engine: Engine | None = None
    parents: Engine | None = None  # of a forked child: kept, but never to be touched


_process = _Process()


def init(
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
    **overrides: object,
) -> None:
    """Join the world; returns when all ranks have joined. All ranks call it; a second call does nothing.

    Without arguments, the launcher's environment says who this process is; without a launcher it is alone, of size 1.
    `rank`, `size`: instead of a launcher. `store`: where the ranks meet then, `tcp:host:port` or `unix:@name`; rank 0
    serves it. `overrides`: settings by name (docs/settings.md), before `RONDE_*` variables. Raises UsageError for
    nonsense and contradictions, TimeoutError that names the ranks that did not come, AuthenticationError.
    """
    if comm.is_initialized():
        return
    comm.init(rank, size, store, **overrides)
    wanted = settings.resolve(settings.environment(), **overrides)
    try:
        _process.engine = Engine(comm.world(), wanted)
    except BaseException:
        comm.shutdown()
        raise


def shutdown() -> None:
    """Leave the world; what other ranks have submitted and this one has not, fails. Does nothing before `init`."""
    leaving, _process.engine = _process.engine, None
    if leaving is not None:
        leaving.close()
    comm.shutdown()


def engine() -> Engine:
    """Return the engine. Raises NotInitializedError before `init`."""
    if _process.engine is None:
        comm.world()  # raises, and says why
        raise NotInitializedError("Ronde is being initialized or shut down by another thread")
    return _process.engine


def submit(
    kind: Kind,
    x: Any,
    *,
    name: str | None = None,
    op: ReduceOp = Sum,
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: Sequence[int] | None = None,
    out: Any = None,
    waits: bool = False,
    device: str = "cpu",
) -> Handle:
    """Submit a tensor (see Engine.submit)."""
    return engine().submit(kind, x, name, op, root, prescale, postscale, splits, out, waits, device)


def prepare(
    x: Any, name: str, op: ReduceOp = Sum, prescale: float = 1.0, postscale: float = 1.0
) -> Callable[[bool], Handle]:
    """Prepare an all-reduce in place that is going to be repeated (see Engine.prepare)."""
    return engine().prepare(x, name, op, prescale, postscale)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record this rank's timeline; the other ranks need not take part. docs/timeline.md tells what is in it.

    `file_path`: of the file, which is replaced if there is one. With several ranks each writes its own: `{rank}` stands
    for the rank, a directory gets a file `rank-N.json` for each, and otherwise the rank goes before the suffix
    (`run-0.json`). `mark_cycles`: a tick for every decision of what runs next. Raises UsageError if a timeline is being
    recorded already, OSError if the file cannot be made, NotInitializedError before `init`.
    """
    engine().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline that is being recorded, if there is one. `shutdown` does it, too."""
    engine().timeline.stop()


def _forget() -> None:
    if _process.engine is not None:
        _process.engine.abandon()
        _process.parents, _process.engine = _process.engine, None


os.register_at_fork(after_in_child=_forget)
atexit.register(shutdown)
