"""Operations that autograd can follow, and their gradients.

The gradients are Horovod's. Of `allreduce` it is that of the sum of all ranks' losses; of `allgather`, `broadcast` and
`reducescatter` that of the mean (in `reducescatter` with Sum: of the sum of losses, times the number of ranks).
Every rank must go backward through the same operations, because the gradients are operations too: they go under the
name of the operation plus ".gradient", or are numbered in the order in which autograd comes to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ronde.comm.queries import rank, size
from ronde.torch.handles import Handle, Received, start, wait_all
from ronde.torch.sparse import start_sparse
from ronde.types import Average, Kind, ReduceOp, Sum

__all__ = [
    "Reduction",
    "allgather_all",
    "allreduce_all",
    "alltoall_rows",
    "broadcast_from",
    "reducescatter_all",
    "start_alltoall",
    "start_reductions",
]

Names = Sequence[str | None]


class Reduction(NamedTuple):
    """How tensors of all ranks become one."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


def allreduce_all(tensors: Sequence[Any], names: Names, reduction: Reduction) -> list[Any]:
    """Reduce each tensor over all ranks."""
    if _is_followed(tensors):
        return list(_Allreduce.apply(reduction, names, *tensors))
    return _reduce(Kind.allreduce, tensors, names, reduction)


def reducescatter_all(tensors: Sequence[Any], names: Names, reduction: Reduction) -> list[Any]:
    """Reduce each tensor over all ranks, and return this rank's rows of each."""
    if _is_followed(tensors):
        return list(_Reducescatter.apply(reduction, names, *tensors))
    return _reduce(Kind.reducescatter, tensors, names, reduction)


def allgather_all(tensors: Sequence[Any], names: Names) -> list[Any]:
    """Join each tensor with those of all ranks."""
    if _is_followed(tensors):
        return list(_Allgather.apply(names, *tensors))
    return _gather(tensors, names)


def broadcast_from(root: int, tensor: Any, name: str | None) -> Any:
    """Return the root's tensor."""
    if _is_followed([tensor]):
        return _Broadcast.apply(root, name, tensor)
    return start(Kind.broadcast, tensor, name=name, root=root, waits=True).wait()


def alltoall_rows(tensor: Any, splits: Any, name: str | None) -> tuple[Any, Any]:
    """Return the rows that the ranks have for this one, and how many came from each."""
    if _is_followed([tensor]):
        result, received = _Alltoall.apply(splits, name, tensor)
        return result, received
    return start_alltoall(tensor, splits, name, waits=True).wait()


def start_reductions(
    kind: Kind, tensors: Sequence[Any], names: Names, reduction: Reduction, **how: Any
) -> list[Handle]:
    """Submit each tensor to be reduced."""
    op, prescale, postscale = reduction
    how |= dict(op=op, prescale=prescale, postscale=postscale)
    return [
        start_sparse(tensor, name=name, **how)
        if kind is Kind.allreduce and tensor.is_sparse
        else start(kind, tensor, name=name, **how)
        for tensor, name in zip(tensors, names)
    ]


def start_alltoall(tensor: Any, splits: Any, name: str | None, waits: bool = False) -> Received:
    """Submit a tensor whose rows go to all ranks; `splits`: how many to each, None, a tensor or other integers."""
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    return Received(start(Kind.alltoall, tensor, name=name, splits=counts, waits=waits), splits)


def _reduce(kind: Kind, tensors: Sequence[Any], names: Names, reduction: Reduction) -> list[Any]:
    return wait_all(start_reductions(kind, tensors, names, reduction, waits=len(tensors) == 1))


def _gather(tensors: Sequence[Any], names: Names) -> list[Any]:
    waits = len(tensors) == 1
    return wait_all(
        [start(Kind.allgather, tensor, name=name, waits=waits) for tensor, name in zip(tensors, names)]
    )


def _is_followed(tensors: Sequence[Any]) -> bool:
    return any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled()


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _of_gradients(names: Names) -> list[str | None]:
    return [_of_gradient(name) for name in names]


def _refuse_unless_linear(operation: str, op: ReduceOp) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(f"{operation} with op={op.name} has no gradient; Sum and Average have")


class _Allreduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, reduction: Reduction, names: Names, *tensors: Any) -> tuple[Any, ...]:
        ctx.reduction, ctx.names = reduction, names
        return tuple(_reduce(Kind.allreduce, tensors, names, reduction))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        _refuse_unless_linear("allreduce", ctx.reduction.op)
        return (None, None, *allreduce_all(gradients, _of_gradients(ctx.names), ctx.reduction))


class _Reducescatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, reduction: Reduction, names: Names, *tensors: Any) -> tuple[Any, ...]:
        ctx.reduction, ctx.names = reduction, names
        return tuple(_reduce(Kind.reducescatter, tensors, names, reduction))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        op, prescale, postscale = ctx.reduction
        _refuse_unless_linear("reducescatter", op)
        factor = prescale * postscale * (size() if op == Sum else 1)
        if factor != 1:
            gradients = tuple(gradient * factor for gradient in gradients)
        return (None, None, *allgather_all(gradients, _of_gradients(ctx.names)))


class _Allgather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, names: Names, *tensors: Any) -> tuple[Any, ...]:
        ctx.names, ctx.shapes = names, [tuple(tensor.shape) for tensor in tensors]
        return tuple(_gather(tensors, names))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        names = _of_gradients(ctx.names)
        mine = torch.tensor([[shape[0] if shape else 1 for shape in ctx.shapes]])
        rows = _gather([mine], [names[0] and f"{names[0]}.rows"])[0]  # [ranks, tensors]
        offsets = rows[: rank()].sum(dim=0).tolist()
        means = allreduce_all(gradients, names, Reduction(Average))
        shares = [
            mean.narrow(0, offset, count).reshape(shape)
            for mean, offset, count, shape in zip(means, offsets, mine[0].tolist(), ctx.shapes)
        ]
        return (None, *shares)


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, root: int, name: str | None, tensor: Any) -> Any:
        ctx.root, ctx.name = root, name
        return start(Kind.broadcast, tensor, name=name, root=root, waits=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (mean,) = allreduce_all([gradient], [_of_gradient(ctx.name)], Reduction(Average))
        return None, None, mean if rank() == ctx.root else torch.zeros_like(mean)


class _Alltoall(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, splits: Any, name: str | None, tensor: Any) -> tuple[Any, Any]:
        result, received = start_alltoall(tensor, splits, name, waits=True).wait()
        ctx.name, ctx.received = name, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> tuple[Any, ...]:
        returned, _ = alltoall_rows(gradient, ctx.received, _of_gradient(ctx.name))
        return None, None, returned
