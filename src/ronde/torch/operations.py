"""The operations of `horovod.torch`: named, in any order, blocking or not, in place or not.

Tensors not on the CPU are copied through main memory. Autograd works through the blocking forms that return new tensors
(ronde.torch.differentiable has the gradients). The rules of groups are in ronde.torch.tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import overload

import torch

from ronde.engine.process import ProcessSet, global_process_set, submit
from ronde.torch.call import Call
from ronde.torch.compression import Compression, Compressor
from ronde.torch.differentiable import run_call, start_alltoall
from ronde.torch.handles import Handle
from ronde.torch.tensors import check_tensors, start_tensor, start_tensors
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
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor:
    """Return the tensors of all ranks, combined element by element, as a new tensor.

        mean = hvd.allreduce(loss.detach(), name="loss")

    The average of integers is truncated towards zero.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        compression: hvd.Compression.fp16 or bf16 sends 16 bits per element (default: none).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = _call(op, average, name, prescale_factor, postscale_factor, process_set, waits=True)
    return _run_compressed(call, [tensor], compression)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor:
    """Combine the tensors of all ranks element by element in place, and return the tensor.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = _call(op, average, name, prescale_factor, postscale_factor, process_set, in_place=True, waits=True)
    return start_tensor(call, tensor).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[torch.Tensor]:
    """Start an `allreduce`, and return a handle for `synchronize`. The tensor must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    call = _call(op, average, name, prescale_factor, postscale_factor, process_set)
    return start_tensor(call, tensor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[torch.Tensor]:
    """Start an `allreduce_`, and return a handle for `synchronize`. The tensor must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    call = _call(op, average, name, prescale_factor, postscale_factor, process_set, in_place=True)
    return start_tensor(call, tensor)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[torch.Tensor]:
    """Return the `allreduce` of each tensor, as a list; they complete together.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        compression: hvd.Compression.fp16 or bf16 sends 16 bits per element (default: none).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = _call(op, average, name, prescale_factor, postscale_factor, process_set, waits=True, is_group=True)
    return _run_compressed(call, tensors, compression)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> list[torch.Tensor]:
    """Combine each of the tensors in place, and return them.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = _call(
        op, average, name, prescale_factor, postscale_factor, process_set, True, waits=True, is_group=True
    )
    results: list[torch.Tensor] = start_tensors(call, tensors).wait()
    return results


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_allreduce`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    call = _call(op, average, name, prescale_factor, postscale_factor, process_set, is_group=True)
    return start_tensors(call, tensors)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_allreduce_`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        average: deprecated: use `op`.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max, Product or Adasum (default: Average).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    call = _call(
        op, average, name, prescale_factor, postscale_factor, process_set, in_place=True, is_group=True
    )
    return start_tensors(call, tensors)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first axis, whose length may differ between ranks.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and, except for the first axis, the same shape on
            all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return run_call(Call(Allgather, name, process_set, waits=True), [tensor])[0]


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[torch.Tensor]:
    """Start an `allgather`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and, except for the first axis, the same shape on
            all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    return start_tensor(Call(Allgather, name, process_set), tensor)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> list[torch.Tensor]:
    """Return the `allgather` of each tensor, as a list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return run_call(Call(Allgather, name, process_set, waits=True, is_group=True), tensors)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_allgather`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    return start_tensors(Call(Allgather, name, process_set, is_group=True), tensors)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor:
    """Return the tensor of rank `root_rank`.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        root_rank: a rank of the world, also with a process set.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return run_call(Call(Broadcast, name, process_set, waits=True, root=root_rank), [tensor])[0]


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor:
    """Copy the tensor of rank `root_rank` into the tensor, and return it.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        root_rank: a rank of the world, also with a process set.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = Call(Broadcast, name, process_set, in_place=True, waits=True, root=root_rank)
    return start_tensor(call, tensor).wait()


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[torch.Tensor]:
    """Start a `broadcast`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        root_rank: a rank of the world, also with a process set.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    return start_tensor(Call(Broadcast, name, process_set, root=root_rank), tensor)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[torch.Tensor]:
    """Start a `broadcast_`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        root_rank: a rank of the world, also with a process set.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    return start_tensor(Call(Broadcast, name, process_set, in_place=True, root=root_rank), tensor)


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send `splits[p]` rows of the tensor to rank p; return the rows that the ranks send to this one, in rank order.

    With `splits`, return a pair: these rows, and how many came from each rank, as a tensor. Ranks may have different
    numbers of rows.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and, except for the first axis, the same shape on
            all ranks.
        splits: the number of rows for each rank, as a list or tensor of integers (None: the same number for all).
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    result, received = run_call(Call(Alltoall, name, process_set, waits=True, splits=splits), [tensor])
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Start an `alltoall`, and return a handle. `synchronize` returns the rows, and how many came from each rank.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and, except for the first axis, the same shape on
            all ranks.
        splits: the number of rows for each rank, as a list or tensor of integers (None: the same number for all).
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    return start_alltoall(Call(Alltoall, name, process_set, splits=splits), tensor)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine like `allreduce`, and return this rank's part of the first axis, divided as by `numpy.array_split`.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        compression: hvd.Compression.fp16 or bf16 sends 16 bits per element (default: none).
        op: the reduction: hvd.Average, Sum, Min, Max or Product (default: Average).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = Call(Reducescatter, name, process_set, op, prescale_factor, postscale_factor, waits=True)
    return _run_compressed(call, [tensor], compression)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start a `reducescatter`, and return a handle for `synchronize`. The tensors must not change until then.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensor: a tensor of any layout, on any device; the same dtype and shape on all ranks.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max or Product (default: Average).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    return start_tensor(Call(Reducescatter, name, process_set, op, prescale_factor, postscale_factor), tensor)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the `reducescatter` of each tensor, as a list.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        compression: hvd.Compression.fp16 or bf16 sends 16 bits per element (default: none).
        op: the reduction: hvd.Average, Sum, Min, Max or Product (default: Average).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works.
        PeerLostError: a rank died, left or cannot be reached.
    """
    call = Call(
        Reducescatter, name, process_set, op, prescale_factor, postscale_factor, waits=True, is_group=True
    )
    return _run_compressed(call, tensors, compression)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start a `grouped_reducescatter`, and return a handle for `synchronize`, until which tensors must not change.

    All ranks of the process set call it with the same name, in any order and from any thread.

    Args:
        tensors: a list of tensors. The group runs when all ranks have submitted it.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: the reduction: hvd.Average, Sum, Min, Max or Product (default: Average).
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).
        prescale_factor: multiplies the input (default: 1).
        postscale_factor: multiplies the result (default: 1).

    Raises:
        ValueError: an operation with this name is not complete yet, or this rank is not in the process set.
        UsageError: an argument is invalid; it is a ValueError. Nothing was sent.
        MismatchError: ranks submitted different operations under the name, on all ranks; it is a RuntimeError. The next
            operation works. Raised by `synchronize`.
        PeerLostError: a rank died, left or cannot be reached. Raised by `synchronize`.
    """
    call = Call(Reducescatter, name, process_set, op, prescale_factor, postscale_factor, is_group=True)
    return start_tensors(call, tensors)


def barrier(
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Return when all ranks have called it.

    All ranks of the process set call it, in any order and from any thread.

    Args:
        process_set: the ranks that take part (default: hvd.global_process_set, all ranks).

    Raises:
        ValueError: this rank is not in the process set.
        PeerLostError: a rank died, left or cannot be reached.
    """
    submit(Barrier, None, waits=True, process_set=process_set).wait()


def _call(
    op: ReduceOp | None,
    average: bool | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | None,
    in_place: bool = False,
    waits: bool = False,
    is_group: bool = False,
) -> Call:
    if average is not None:
        if op is not None:
            raise ValueError("give op or average, not both; average is deprecated")
        warnings.warn("average= is deprecated; say op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    op = Average if op is None else op
    return Call(Allreduce, name, process_set, op, prescale, postscale, in_place, waits, is_group)


def _run_compressed(
    call: Call, tensors: Sequence[torch.Tensor], compression: Compressor
) -> list[torch.Tensor]:
    check_tensors(tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = run_call(call, [sent for sent, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]
