"""The engine's operations as functions: named, in any order, blocking or not.

All ranks submit the same names, each in its own order and from any thread. Every function takes any array (NumPy,
PyTorch on the CPU, ...) and returns one of the same kind; the `_async` ones return a handle whose `wait()` does. The
grouped ones take and return lists: the arrays of a group run when all ranks have submitted all of them, under one name.

`name`: None numbers the operations of a sort in program order. `process_set`: the ranks that take part, None for all.
Raises ValueError if the name is in flight already, UsageError for what makes no sense or if this process is not in the
set, and in `wait()` on all ranks MismatchError for what they disagree about, PeerLostError if a rank is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ronde._native import Handle
from ronde.engine.arrivals import Arrivals
from ronde.engine.process import engine, submit
from ronde.engine.process_sets import ProcessSet
from ronde.types import (
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Barrier,
    Broadcast,
    ReduceOp,
    Reducescatter,
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
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "stragglers",
    "synchronize",
]


def allreduce(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: Any = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return the arrays of all ranks, combined element by element; `out=x` works in place.

    The input is multiplied by `prescale_factor`, the result by `postscale_factor`. The average of integers is cut off
    towards zero. `op=Adasum` takes the array as one vector.
    """
    handle = engine(process_set).submit(
        Allreduce, x, name, op, -1, prescale_factor, postscale_factor, None, out, True
    )
    return handle.wait()


def allreduce_async(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: Any = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Begin an `allreduce`. `x` and `out` must not change until the handle is done."""
    return engine(process_set).submit(
        Allreduce, x, name, op, -1, prescale_factor, postscale_factor, None, out, False
    )


def grouped_allreduce(
    xs: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    outs: Sequence[Any] | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Return what `allreduce` returns, of each array. They may be of different types."""
    handle = engine(process_set).submit_group(
        Allreduce, xs, name, op, prescale_factor, postscale_factor, outs, waits=True
    )
    results: list[Any] = handle.wait()
    return results


def grouped_allreduce_async(
    xs: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    outs: Sequence[Any] | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Begin a `grouped_allreduce`."""
    return engine(process_set).submit_group(Allreduce, xs, name, op, prescale_factor, postscale_factor, outs)


def allgather(x: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """Return the arrays of all ranks, concatenated along the first axis, whose length may differ between ranks."""
    return submit(Allgather, x, name=name, waits=True, process_set=process_set).wait()


def allgather_async(x: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """Begin an `allgather`."""
    return submit(Allgather, x, name=name, process_set=process_set)


def grouped_allgather(
    xs: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Return what `allgather` returns, of each array."""
    results: list[Any] = engine(process_set).submit_group(Allgather, xs, name, waits=True).wait()
    return results


def grouped_allgather_async(
    xs: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """Begin a `grouped_allgather`."""
    return engine(process_set).submit_group(Allgather, xs, name)


def broadcast(
    x: Any, root: int = 0, name: str | None = None, out: Any = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the array of rank `root`; `x` has the same shape and type everywhere, `out=x` works in place.

    `root` is a rank of the world, also with a process set.
    """
    return submit(Broadcast, x, name=name, root=root, out=out, waits=True, process_set=process_set).wait()


def broadcast_async(
    x: Any, root: int = 0, name: str | None = None, out: Any = None, process_set: ProcessSet | None = None
) -> Handle:
    """Begin a `broadcast`."""
    return submit(Broadcast, x, name=name, root=root, out=out, process_set=process_set)


def alltoall(
    x: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send `splits[p]` rows of `x` to rank p (equally many to all, if None); return the rows that came, by rank.

    The handle of `alltoall_async` also has `received_splits`: how many rows came from each rank.
    """
    return submit(Alltoall, x, name=name, splits=splits, waits=True, process_set=process_set).wait()


def alltoall_async(
    x: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Begin an `alltoall`."""
    return submit(Alltoall, x, name=name, splits=splits, process_set=process_set)


def reducescatter(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Any:
    """Combine like `allreduce`; return this rank's share of the first axis (as `numpy.array_split` divides it)."""
    handle = engine(process_set).submit(
        Reducescatter, x, name, op, -1, prescale_factor, postscale_factor, None, None, True
    )
    return handle.wait()


def reducescatter_async(
    x: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Begin a `reducescatter`."""
    return engine(process_set).submit(
        Reducescatter, x, name, op, -1, prescale_factor, postscale_factor, None, None, False
    )


def grouped_reducescatter(
    xs: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Return what `reducescatter` returns, of each array."""
    handle = engine(process_set).submit_group(
        Reducescatter, xs, name, op, prescale_factor, postscale_factor, waits=True
    )
    results: list[Any] = handle.wait()
    return results


def grouped_reducescatter_async(
    xs: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Begin a `grouped_reducescatter`."""
    return engine(process_set).submit_group(Reducescatter, xs, name, op, prescale_factor, postscale_factor)


def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Return once every rank has submitted it."""
    submit(Barrier, None, name=name, waits=True, process_set=process_set).wait()


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return (or raise) at once."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result."""
    return handle.wait()


def stragglers(process_set: ProcessSet | None = None) -> list[Arrivals]:
    """Return, by rank, who arrives last, how often and how late, since `init`. Any rank may call it, at any time.

    It counts tensors that needed no negotiation; docs/stalls.md says how. Raises TimeoutError that names the ranks that
    do not answer.
    """
    return engine(process_set).arrivals()
