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

from ronde.comm.queries import rank
from ronde.torch.call import Call
from ronde.torch.handles import Received, check_tensors, start_dense
from ronde.torch.members import place_in, size_of
from ronde.torch.reductions import start_tensor, start_tensors
from ronde.types import Average, Kind, ReduceOp, Sum

__all__ = ["run", "start_alltoall"]


def run(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Carry out the operation, so that autograd can follow; return the result of each tensor.

    An all-to-all returns two: the rows for this rank, and how many came from each rank.
    """
    check_tensors(tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_FUNCTIONS[call.kind].apply(call, *tensors))
    return _run(call, tensors)


def start_alltoall(call: Call, tensor: Any) -> Received:
    """Submit a tensor whose rows go to all ranks."""
    splits = call.splits
    if isinstance(splits, torch.Tensor):
        call = call._replace(splits=splits.tolist())
    return Received(start_dense(call, tensor), splits)


def _run(call: Call, tensors: Sequence[Any]) -> list[Any]:
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
        return tuple(_run(call, tensors))


class _Allreduce(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        _refuse_unless_linear("allreduce", ctx.call.op)
        call = ctx.call.gradient(Kind.allreduce, ctx.call.op, ctx.call.prescale, ctx.call.postscale)
        return (None, *run(call, gradients))


class _Reducescatter(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call = ctx.call
        _refuse_unless_linear("reducescatter", call.op)
        factor = call.prescale * call.postscale * (size_of(call.process_set) if call.op == Sum else 1)
        if factor != 1:
            gradients = tuple(gradient * factor for gradient in gradients)
        return (None, *run(call.gradient(Kind.allgather), gradients))


class _Allgather(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call, place = ctx.call.gradient(Kind.allreduce, Average), place_in(ctx.call.process_set)
        counts = [shape[0] if shape else 1 for shape in ctx.shapes]
        name = None if call.name is None else f"{call.name}.rows"
        of_rows = Call(Kind.allgather, name, call.process_set, waits=True)
        (told,) = _run(of_rows, [torch.tensor([[place, *counts]])])  # [ranks, 1 + tensors]
        offsets = told[told[:, 0] < place, 1:].sum(dim=0).tolist()  # ranks that have joined tell nothing
        shares = [
            mean.narrow(0, offset, count).reshape(shape)
            for mean, offset, count, shape in zip(run(call, gradients), offsets, counts, ctx.shapes)
        ]
        return (None, *shares)


class _Broadcast(_Followed):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (mean,) = run(ctx.call.gradient(Kind.allreduce, Average), gradients)
        return None, mean if rank() == ctx.call.root else torch.zeros_like(mean)


class _Alltoall(_Followed):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Any, ...]:
        result, received = _run(call, tensors)
        ctx.call, ctx.received = call, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call = ctx.call.gradient(Kind.alltoall)._replace(splits=ctx.received)
        returned, _ = run(call, gradients[:1])
        return None, returned


_FUNCTIONS: dict[Kind, Any] = {
    Kind.allreduce: _Allreduce,
    Kind.reducescatter: _Reducescatter,
    Kind.allgather: _Allgather,
    Kind.broadcast: _Broadcast,
    Kind.alltoall: _Alltoall,
}
