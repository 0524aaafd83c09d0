"""The engine of this process: begins with `init`, ends with `shutdown`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

from ronde import settings
from ronde._native import Handle
from ronde.comm import world as comm
from ronde.engine.engine import Engine
from ronde.errors import NotInitializedError
from ronde.types import Kind, ReduceOp, Sum

__all__ = ["engine", "init", "shutdown", "submit"]

_engine: Engine | None = None
_pid = 0


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
    global _engine, _pid
    if comm.is_initialized():
        return
    comm.init(rank, size, store, **overrides)
    wanted = settings.resolve(settings.environment(), **overrides)
    try:
        _engine, _pid = Engine(comm.world(), wanted), os.getpid()
    except BaseException:
        comm.shutdown()
        raise


def shutdown() -> None:
    """Leave the world; what other ranks have submitted and this one has not, fails. Does nothing before `init`."""
    global _engine
    leaving, _engine = _engine, None
    if leaving is not None and _pid == os.getpid():
        leaving.close()
    comm.shutdown()


def engine() -> Engine:
    """Return the engine. Raises NotInitializedError before `init`."""
    if _engine is None:
        raise NotInitializedError("Ronde is not initialized in this process: call ronde.init() first")
    if _pid != os.getpid():
        raise NotInitializedError("this process was forked after ronde.init(); call it in the child instead")
    return _engine


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
) -> Handle:
    """Submit a tensor (see Engine.submit)."""
    return engine().submit(kind, x, name, op, root, prescale, postscale, splits, out, waits)


atexit.register(shutdown)
