"""The operations of `horovod.torch`: named, in any order, blocking or not, in place or not.

Tensors not on the CPU are copied through main memory. Autograd works through the blocking forms that return new tensors
(ronde.torch.differentiable has the gradients). The rules of groups are in ronde.torch.groups. The parameters and errors
that all operations share are described once, at the end of this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ronde.engine.process import engine, global_process_set, submit
from ronde.engine.process_sets import ProcessSet
from ronde.help_texts import complete_help
from ronde.torch.compression import Compression, Compressor
from ronde.torch.differentiable import (
    Call,
    allgather_all,
    allreduce_all,
    alltoall_rows,
    broadcast_from,
    reducescatter_all,
    start_alltoall,
    start_gather,
    start_reductions,
)
from ronde.torch.handles import Handle, check_tensors, start
from ronde.torch.reductions import Reduction, start_reduction
from ronde.types import Allreduce, Average, Kind, ReduceOp, Sum

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Return the tensors of all ranks, combined element by element, as a new tensor.

    mean = hvd.allreduce(loss.detach(), name="loss")
    """
    reduction = Reduction(_chosen(op, average), prescale_factor, postscale_factor)
    return _compressed(
        compression, [tensor], lambda sent: allreduce_all(sent, Call(name, process_set), reduction)
    )[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Combine the tensors of all ranks element by element in place, and return the tensor."""
    reduction = Reduction(_chosen(op, average), prescale_factor, postscale_factor)
    handle = start_reduction(
        Kind.allreduce, tensor, name, reduction, in_place=True, waits=True, process_set=process_set
    )
    return handle.wait()


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `allreduce`, and return a handle for `synchronize`. The tensor must not change until then."""
    return _reduction(
        tensor, name, _chosen(op, average), prescale_factor, postscale_factor, False, process_set
    )


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `allreduce_`, and return a handle for `synchronize`. The tensor must not change until then."""
    return _reduction(
        tensor, name, _chosen(op, average), prescale_factor, postscale_factor, True, process_set
    )


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[Any]:
    """Return the `allreduce` of each tensor, as a list; they complete together."""
    reduction = Reduction(_chosen(op, average), prescale_factor, postscale_factor)
    call = Call(name, process_set, is_group=True)
    return _compressed(compression, tensors, lambda sent: allreduce_all(sent, call, reduction))


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[Any]:
    """Combine each of the tensors in place, and return them."""
    reduction = Reduction(_chosen(op, average), prescale_factor, postscale_factor)
    call = Call(name, process_set, is_group=True)
    handle = start_reductions(Kind.allreduce, tensors, call, reduction, in_place=True, waits=True)
    results: list[Any] = handle.wait()
    return results


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce`, and return a handle for `synchronize`. The tensors must not change until then."""
    reduction = Reduction(_chosen(op, average), prescale_factor, postscale_factor)
    return start_reductions(Kind.allreduce, tensors, Call(name, process_set, is_group=True), reduction)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce_`, and return a handle for `synchronize`. The tensors must not change until then."""
    reduction = Reduction(_chosen(op, average), prescale_factor, postscale_factor)
    call = Call(name, process_set, is_group=True)
    return start_reductions(Kind.allreduce, tensors, call, reduction, in_place=True)


def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Return the tensors of all ranks, concatenated along the first axis, whose length may differ between ranks."""
    return allgather_all([tensor], Call(name, process_set))[0]


def allgather_async(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `allgather`, and return a handle for `synchronize`. The tensors must not change until then."""
    return start(Kind.allgather, tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> list[Any]:
    """Return the `allgather` of each tensor, as a list."""
    return allgather_all(tensors, Call(name, process_set, is_group=True))


def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `grouped_allgather`, and return a handle for `synchronize`. The tensors must not change until then."""
    return start_gather(tensors, Call(name, process_set, is_group=True))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Return the tensor of rank `root_rank`."""
    return broadcast_from(root_rank, tensor, Call(name, process_set))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Copy the tensor of rank `root_rank` into the tensor, and return it."""
    how: dict[str, Any] = dict(name=name, root=root_rank, process_set=process_set)
    return start(Kind.broadcast, tensor, in_place=True, waits=True, **how).wait()


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `broadcast`, and return a handle for `synchronize`. The tensors must not change until then."""
    return start(Kind.broadcast, tensor, name=name, root=root_rank, process_set=process_set)


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start a `broadcast_`, and return a handle for `synchronize`. The tensors must not change until then."""
    how: dict[str, Any] = dict(name=name, root=root_rank, process_set=process_set)
    return start(Kind.broadcast, tensor, in_place=True, **how)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Send `splits[p]` rows of the tensor to rank p; return the rows that came, in the order of ranks.

    `splits`: a tensor or list of integers; then how many rows came from each rank is returned too, as a tensor. None
    sends equally many to every rank. Ranks may have different numbers of rows.
    """
    result, received = alltoall_rows(tensor, splits, Call(name, process_set))
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle:
    """Start an `alltoall`, and return a handle. `synchronize` returns the rows and how many came from each rank."""
    return start_alltoall(tensor, splits, Call(name, process_set))


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine like `allreduce`, and return this rank's rows; the first ranks get one more if needed."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return _compressed(
        compression, [tensor], lambda sent: reducescatter_all(sent, Call(name, process_set), reduction)
    )[0]


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`, and return a handle for `synchronize`. The tensors must not change until then."""
    check_tensors((tensor,))
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return start_reduction(Kind.reducescatter, tensor, name, reduction, process_set=process_set)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return the `reducescatter` of each tensor, as a list."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    call = Call(name, process_set, is_group=True)
    return _compressed(compression, tensors, lambda sent: reducescatter_all(sent, call, reduction))


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`, and return a handle for `synchronize`, until which tensors must not change."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return start_reductions(Kind.reducescatter, tensors, Call(name, process_set, is_group=True), reduction)


def barrier(
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Return when all ranks have called it."""
    submit(Kind.barrier, None, waits=True, process_set=process_set).wait()


def _chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give op or average, not both; average is deprecated")
    warnings.warn("average= is deprecated; say op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def _reduction(
    tensor: Any,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    in_place: bool,
    process_set: ProcessSet | None,
) -> Handle:
    check_tensors((tensor,))
    if not tensor.is_cpu or tensor.is_sparse:
        reduction = Reduction(op, prescale, postscale)
        return start_reduction(Allreduce, tensor, name, reduction, in_place=in_place, process_set=process_set)
    out = tensor if in_place else None  # the shortest way, for those who submit many
    return engine(process_set).submit(Allreduce, tensor, name, op, -1, prescale, postscale, None, out, False)


def _compressed(
    compression: Compressor, tensors: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    check_tensors(tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = reduce([sent for sent, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]


_SHARED = {
    "tensor": "a tensor of any layout, on any device; the same shape and"
    " dtype on all ranks (all-gather and all-to-all: except for the first axis).",
    "tensors": "a list of tensors. The group runs when all ranks have submitted it.",
    "average": "deprecated: use `op`.",
    "name": "the same on all ranks, and of one operation at a time (None: numbered in program order).",
    "compression": "hvd.Compression.fp16 or bf16 sends 16 bits per element (default: none).",
    "op": "the reduction: hvd.Average, Sum, Min, Max, Product, or Adasum in an all-reduce (None: Average).",
    "prescale_factor": "multiplies the input (default: 1).",
    "postscale_factor": "multiplies the result (default: 1).",
    "root_rank": "a rank of the world, also with a process set.",
    "splits": "the number of rows for each rank, as a list or tensor of integers (None: the same number for all).",
    "process_set": "the ranks that take part (default: hvd.global_process_set, all ranks).",
}
_ERRORS = {
    "ValueError": "an operation with this name is not complete yet, or this rank is not in the process set.",
    "UsageError": "an argument is invalid; it is a ValueError. Nothing was sent.",
    "MismatchError": "ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next"
    " operation works.",
    "PeerLostError": "a rank died, left or cannot be reached. Asynchronous operations raise it in `synchronize`.",
}
complete_help(
    [globals()[name] for name in __all__],
    _SHARED,
    _ERRORS,
    "All ranks of the process set call it with the same name, in any order and from any thread.",
)
