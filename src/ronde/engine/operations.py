"""The engine's operations as functions: named, in any order, blocking or not.

All ranks submit the same names, each in its own order and from any thread. Every function takes any array (NumPy,
PyTorch on the CPU, ...) and returns one of the same kind; the `_async` ones return a handle whose `wait()` does.
`name`: None numbers the operations of a kind in program order. Raises ValueError if the name is in flight already,
UsageError for what makes no sense, and in `wait()` on all ranks MismatchError for what they disagree about,
PeerLostError if a rank is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ronde._native import Handle
from ronde.engine.process import engine
from ronde.types import (
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Barrier,
    Broadcast,
    ReduceOp,
    Reducescatter,
    Sum,
)

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


def allreduce(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: Any = None,
) -> Any:
    """Return the arrays of all ranks, combined element by element; `out=x` works in place.

    The input is multiplied by `prescale_factor`, the result by `postscale_factor`. The average of integers is rounded
    down. `op=Adasum` takes the array as one vector.
    """
    return (
        engine().submit(Allreduce, x, name, op, -1, prescale_factor, postscale_factor, None, out, True).wait()
    )


def allreduce_async(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: Any = None,
) -> Handle:
    """Begin an `allreduce`. `x` and `out` must not change until the handle is done."""
    return engine().submit(Allreduce, x, name, op, -1, prescale_factor, postscale_factor, None, out, False)


def allgather(x: Any, name: str | None = None) -> Any:
    """Return the arrays of all ranks, concatenated along the first axis, whose length may differ between ranks."""
    return engine().submit(Allgather, x, name, Sum, -1, 1.0, 1.0, None, None, True).wait()


def allgather_async(x: Any, name: str | None = None) -> Handle:
    """Begin an `allgather`."""
    return engine().submit(Allgather, x, name, Sum, -1, 1.0, 1.0, None, None, False)


def broadcast(x: Any, root: int = 0, name: str | None = None, out: Any = None) -> Any:
    """Return the array of rank `root`; `x` has the same shape and type everywhere, `out=x` works in place."""
    return engine().submit(Broadcast, x, name, Sum, root, 1.0, 1.0, None, out, True).wait()


def broadcast_async(x: Any, root: int = 0, name: str | None = None, out: Any = None) -> Handle:
    """Begin a `broadcast`."""
    return engine().submit(Broadcast, x, name, Sum, root, 1.0, 1.0, None, out, False)


def alltoall(x: Any, splits: Sequence[int] | None = None, name: str | None = None) -> Any:
    """Send `splits[p]` rows of `x` to rank p (equally many to all, if None); return the rows that came, by rank.

    The handle of `alltoall_async` also has `received_splits`: how many rows came from each rank.
    """
    return engine().submit(Alltoall, x, name, Sum, -1, 1.0, 1.0, splits, None, True).wait()


def alltoall_async(x: Any, splits: Sequence[int] | None = None, name: str | None = None) -> Handle:
    """Begin an `alltoall`."""
    return engine().submit(Alltoall, x, name, Sum, -1, 1.0, 1.0, splits, None, False)


def reducescatter(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine like `allreduce`; return this rank's share of the first axis (as `numpy.array_split` divides it)."""
    return (
        engine()
        .submit(Reducescatter, x, name, op, -1, prescale_factor, postscale_factor, None, None, True)
        .wait()
    )


def reducescatter_async(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`."""
    return engine().submit(
        Reducescatter, x, name, op, -1, prescale_factor, postscale_factor, None, None, False
    )


def barrier(name: str | None = None) -> None:
    """Return once every rank has submitted it."""
    engine().submit(Barrier, None, name, Sum, -1, 1.0, 1.0, None, None, True).wait()


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return (or raise) at once."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result."""
    return handle.wait()
