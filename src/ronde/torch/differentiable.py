"""Operations that autograd can follow, and their gradients.

The gradients are Horovod's. That of `allreduce` is the gradient of the sum of all ranks' losses; those of `allgather`,
`broadcast` and `reducescatter` are the gradient of the mean (of `reducescatter` with Sum: of the sum, times the number
of ranks). Every rank must run backward through the same operations, because gradients are operations, too: they have
the name of the operation plus ".gradient", or a number in the order in which autograd runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ronde.comm.world import rank
from ronde.torch.call import Call, place_in, size_of
from ronde.torch.handles import Received
from ronde.torch.tensors import check_tensors, start_dense, start_tensor, start_tensors
from ronde.types import Average, Kind, ReduceOp, Sum

__all__ = ["run_call", "start_alltoall"]


def run_call(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run an operation, which autograd can follow, and return the result of each tensor.

    An all-to-all returns two results: the rows that the ranks send to this one, and the number of rows from each.
    """
    check_tensors(tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_FUNCTIONS[call.kind].apply(call, *tensors))
    return _run_now(call, tensors)


def start_alltoall(call: Call, tensor: Any) -> Received:
    """Submit a tensor for an all-to-all."""
    splits = call.splits
    if isinstance(splits, torch.Tensor):
        call = call._replace(splits=splits.tolist())
    return Received(start_dense(call, tensor), splits)


def _run_now(call: Call, tensors: Sequence[Any]) -> list[Any]:
    if call.kind is Kind.alltoall:
        return list(start_alltoall(call, tensors[0]).wait())
    if call.is_group:
        results: list[Any] = start_tensors(call, tensors).wait()
        return results
    return [start_tensor(call, tensors[0]).wait()]


def _refuse_unless_linear(operation: str, op: ReduceOp) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(f"{operation} with op={op.name} has no gradient; Sum and Average have")


class _Followed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Any, ...]:
        ctx.call, ctx.shapes = call, [tuple(tensor.shape) for tensor in tensors]
        return tuple(_run_now(call, tensors))


class _Allreduce(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        _refuse_unless_linear("allreduce", ctx.call.op)
        call = ctx.call.gradient(Kind.allreduce, ctx.call.op, ctx.call.prescale, ctx.call.postscale)
        return (None, *run_call(call, gradients))


class _Reducescatter(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call = ctx.call
        _refuse_unless_linear("reducescatter", call.op)
        factor = call.prescale * call.postscale * (size_of(call.process_set) if call.op == Sum else 1)
        if factor != 1:
            gradients = tuple(gradient * factor for gradient in gradients)
        return (None, *run_call(call.gradient(Kind.allgather), gradients))


class _Allgather(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call, place = ctx.call.gradient(Kind.allreduce, Average), place_in(ctx.call.process_set)
        counts = [shape[0] if shape else 1 for shape in ctx.shapes]
        name = None if call.name is None else f"{call.name}.rows"
        of_rows = Call(Kind.allgather, name, call.process_set, waits=True)
        (rows,) = _run_now(of_rows, [torch.tensor([[place, *counts]])])  # [ranks, 1 + tensors]
        offsets = rows[rows[:, 0] < place, 1:].sum(dim=0).tolist()  # ranks that have joined send nothing
        shares = [
            mean.narrow(0, offset, count).reshape(shape)
            for mean, offset, count, shape in zip(run_call(call, gradients), offsets, counts, ctx.shapes)
        ]
        return (None, *shares)


class _Broadcast(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (mean,) = run_call(ctx.call.gradient(Kind.allreduce, Average), gradients)
        return None, mean if rank() == ctx.call.root else torch.zeros_like(mean)


class _Alltoall(_Followed):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Any, ...]:
        result, received = _run_now(call, tensors)
        ctx.call, ctx.received = call, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call = ctx.call.gradient(Kind.alltoall)._replace(splits=ctx.received)
        returned, _ = run_call(call, gradients[:1])
        return None, returned


_FUNCTIONS: dict[Kind, Any] = {
    Kind.allreduce: _Allreduce,
    Kind.reducescatter: _Reducescatter,
    Kind.allgather: _Allgather,
    Kind.broadcast: _Broadcast,
    Kind.alltoall: _Alltoall,
}
