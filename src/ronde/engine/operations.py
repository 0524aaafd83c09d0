"""The engine's operations as functions: named, in any order, blocking or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from ronde._native import Handle
from ronde.comm.arrays import ArrayT, Number, ResultT
from ronde.engine.engine import Arrivals
from ronde.engine.process import ProcessSet, engine, submit
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


@overload
def allreduce(
    x: Number, name: str | None = None, op: ReduceOp = Average, *, process_set: ProcessSet | None = None
) -> NDArray[Any]: ...
@overload
def allreduce(
    x: ArrayT,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: ArrayT | None = None,
    process_set: ProcessSet | None = None,
) -> ArrayT: ...
def allreduce(
    x: ArrayT | Number,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: ArrayT | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return the arrays of all ranks, combined element by element. `out=x` works in place.

        ronde.init()
        mean = ronde.allreduce(loss, name="loss")

    The average of integers is truncated towards zero. `op=Adasum` treats the array as one vector.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array or a PyTorch tensor on the CPU; the result is of the same kind. A number, or anything else with
            DLPack or the buffer protocol, gives a NumPy array. Any dtype of float16, bfloat16, float32, float64, int8
            to int64, uint8 to uint64, bool, complex64, complex128; the same shape and dtype on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: ronde.Average, Sum, Min, Max, Product, BitAnd, BitOr, BitXor or Adasum (default: Average; the
            methods of `ronde.world()` sum by default).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        out: an array of the result's shape and dtype that receives the result (None: a new array).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    members = engine(process_set)
    return members.submit(Allreduce, x, name, op, prescale_factor, postscale_factor, out, waits=True).wait()


def allreduce_async(
    x: ArrayT,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: ArrayT | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[ArrayT]:
    """Start an `allreduce`, and return a handle. `x` and `out` must not change until `handle.wait()` has returned.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce` (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        out: an array of the result's shape and dtype that receives the result (None: a new array).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).submit(Allreduce, x, name, op, prescale_factor, postscale_factor, out)


def grouped_allreduce(
    xs: Sequence[ArrayT],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    outs: Sequence[ArrayT] | None = None,
    process_set: ProcessSet | None = None,
) -> list[ArrayT]:
    """Return the `allreduce` of each array, as a list. The arrays may have different types and shapes.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        xs: a list of arrays, each as for `allreduce`. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce` (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        outs: a list of arrays that receive the results (None: new arrays).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    members = engine(process_set)
    handle = members.submit_group(
        Allreduce, xs, name, op, prescale_factor, postscale_factor, outs, waits=True
    )
    return handle.wait()


def grouped_allreduce_async(
    xs: Sequence[ArrayT],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    outs: Sequence[ArrayT] | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[list[ArrayT]]:
    """Start a `grouped_allreduce`, and return a handle; `handle.wait()` returns the list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        xs: a list of arrays, each as for `allreduce`. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce` (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        outs: a list of arrays that receive the results (None: new arrays).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).submit_group(Allreduce, xs, name, op, prescale_factor, postscale_factor, outs)


@overload
def allgather(x: Number, name: str | None = None, process_set: ProcessSet | None = None) -> NDArray[Any]: ...
@overload
def allgather(x: ArrayT, name: str | None = None, process_set: ProcessSet | None = None) -> ArrayT: ...
def allgather(x: ArrayT | Number, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """Return the arrays of all ranks, concatenated along the first axis, whose length may differ between ranks.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
            axis, the same shape on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    return submit(Allgather, x, name=name, waits=True, process_set=process_set).wait()


def allgather_async(
    x: ArrayT, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[ArrayT]:
    """Start an `allgather`, and return a handle. `x` must not change until `handle.wait()` has returned.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
            axis, the same shape on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return submit(Allgather, x, name=name, process_set=process_set)


def grouped_allgather(
    xs: Sequence[ArrayT], name: str | None = None, process_set: ProcessSet | None = None
) -> list[ArrayT]:
    """Return the `allgather` of each array, as a list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        xs: a list of arrays, each as for `allgather`. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).submit_group(Allgather, xs, name, waits=True).wait()


def grouped_allgather_async(
    xs: Sequence[ArrayT], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[ArrayT]]:
    """Start a `grouped_allgather`, and return a handle; `handle.wait()` returns the list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        xs: a list of arrays, each as for `allgather`. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).submit_group(Allgather, xs, name)


@overload
def broadcast(
    x: Number, root: int = 0, name: str | None = None, *, process_set: ProcessSet | None = None
) -> NDArray[Any]: ...
@overload
def broadcast(
    x: ArrayT,
    root: int = 0,
    name: str | None = None,
    out: ArrayT | None = None,
    process_set: ProcessSet | None = None,
) -> ArrayT: ...
def broadcast(
    x: ArrayT | Number,
    root: int = 0,
    name: str | None = None,
    out: ArrayT | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return the array of rank `root`. `x` has the same shape and type on all ranks; `out=x` works in place.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
        root: a rank of the world, also with a process set (default: 0).
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        out: an array of the result's shape and dtype that receives the result (None: a new array).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    return submit(Broadcast, x, name=name, root=root, out=out, waits=True, process_set=process_set).wait()


def broadcast_async(
    x: ArrayT,
    root: int = 0,
    name: str | None = None,
    out: ArrayT | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[ArrayT]:
    """Start a `broadcast`, and return a handle. `x` and `out` must not change until `handle.wait()` has returned.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
        root: a rank of the world, also with a process set (default: 0).
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        out: an array of the result's shape and dtype that receives the result (None: a new array).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return submit(Broadcast, x, name=name, root=root, out=out, process_set=process_set)


def alltoall(
    x: ArrayT,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> ArrayT:
    """Send rows of `x` to each rank, and return the rows that the ranks send to this one, in rank order.

    The handle of `alltoall_async` also has `received_splits`, the number of rows from each rank.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
            axis, the same shape on all ranks.
        splits: the number of rows for each rank (None: the same number for all).
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    return submit(Alltoall, x, name=name, splits=splits, waits=True, process_set=process_set).wait()


def alltoall_async(
    x: ArrayT,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[ArrayT]:
    """Start an `alltoall`, and return a handle with `wait()` and `received_splits`.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
            axis, the same shape on all ranks.
        splits: the number of rows for each rank (None: the same number for all).
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return submit(Alltoall, x, name=name, splits=splits, process_set=process_set)


def reducescatter(
    x: ArrayT,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> ArrayT:
    """Combine like `allreduce`, and return this rank's part of the first axis, divided as by `numpy.array_split`.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce`, but not Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    members = engine(process_set)
    return members.submit(Reducescatter, x, name, op, prescale_factor, postscale_factor, waits=True).wait()


def reducescatter_async(
    x: ArrayT,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[ArrayT]:
    """Start a `reducescatter`, and return a handle. `x` must not change until `handle.wait()` has returned.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce`, but not Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).submit(Reducescatter, x, name, op, prescale_factor, postscale_factor)


def grouped_reducescatter(
    xs: Sequence[ArrayT],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[ArrayT]:
    """Return the `reducescatter` of each array, as a list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        xs: a list of arrays, each as for `reducescatter`. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce`, but not Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    members = engine(process_set)
    handle = members.submit_group(Reducescatter, xs, name, op, prescale_factor, postscale_factor, waits=True)
    return handle.wait()


def grouped_reducescatter_async(
    xs: Sequence[ArrayT],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[list[ArrayT]]:
    """Start a `grouped_reducescatter`, and return a handle; `handle.wait()` returns the list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        xs: a list of arrays, each as for `reducescatter`. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction, as for `allreduce`, but not Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
            Raised by `wait()`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `wait()`.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).submit_group(Reducescatter, xs, name, op, prescale_factor, postscale_factor)


def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Return when all ranks have called it.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (None: all ranks).

    Raises:
        UsageError: an argument is invalid, or this rank is not in the process set. Nothing was sent.
        ValueError: an operation with this name is not complete yet.
        MismatchError: ranks submitted different operations under the name, on all ranks. The next operation works.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    submit(Barrier, None, name=name, waits=True, process_set=process_set).wait()


def poll(handle: Handle) -> bool:
    """Return whether the operation of a handle is complete, so that `synchronize` would return or raise at once.

    Args:
        handle: returned by an `_async` operation of this process.

    Raises no error.
    """
    return handle.done()


def synchronize(handle: Handle[ResultT]) -> ResultT:
    """Wait until the operation of a handle is complete, and return its result.

    Args:
        handle: returned by an `_async` operation of this process.

    Raises:
        MismatchError: ranks submitted different operations under the name; the next operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return handle.wait()


def stragglers(process_set: ProcessSet | None = None) -> list[Arrivals]:
    """Return for each rank how often it submitted tensors last, and how late, since `init`.

        for each in ronde.stragglers():
            print(each.rank, each.last, each.late_s)

    Any rank may call it at any time, without the others. Only tensors that needed no negotiation count.

    Args:
        process_set: the ranks in question (None: all ranks).

    Returns:
        A list of `Arrivals`, one for each rank: `rank`, `tensors` (how many count), `last` (how often the rank was the
        last one of its host) and `late_s` (average delay in seconds).

    Raises:
        TimeoutError: some ranks do not answer; the error names them.
        NotInitializedError: before `ronde.init()`.
    """
    return engine(process_set).arrivals()
