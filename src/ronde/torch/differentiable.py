"""Operations that autograd can follow, and their gradients.

The gradients are Horovod's. That of `allreduce` is the gradient of the sum of all ranks' losses; those of `allgather`,
`broadcast` and `reducescatter` are the gradient of the mean (of `reducescatter` with Sum: of the sum, times the number
of ranks). Every rank must run backward through the same operations, because gradients are operations, too: they have
the name of the operation plus ".gradient", or a number in the order in which autograd runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ronde.comm.queries import rank
from ronde.engine.process import global_process_set
from ronde.engine.process_sets import ProcessSet
from ronde.torch.groups import start_group
from ronde.torch.handles import Handle, Received, check_tensors, start
from ronde.torch.members import place_in, size_of
from ronde.torch.reductions import Reduction, start_grouped_reductions, start_reduction
from ronde.types import Average, Kind, ReduceOp, Sum

__all__ = [
    "Call",
    "allgather_all",
    "allreduce_all",
    "alltoall_rows",
    "broadcast_from",
    "reducescatter_all",
    "start_alltoall",
    "start_gather",
    "start_reductions",
]


class Call(NamedTuple):
    """The name and the ranks of an operation, and whether its tensors are a group or a single one."""

    name: str | None
    process_set: ProcessSet | None = global_process_set
    is_group: bool = False

    def of_gradient(self) -> Call:
        """Return the call of the gradient."""
        return self._replace(name=None if self.name is None else f"{self.name}.gradient")


def allreduce_all(tensors: Sequence[Any], call: Call, reduction: Reduction) -> list[Any]:
    """Reduce each tensor over all ranks."""
    if _is_followed(tensors):
        return list(_Allreduce.apply(reduction, call, *tensors))
    return _reduce(Kind.allreduce, tensors, call, reduction)


def reducescatter_all(tensors: Sequence[Any], call: Call, reduction: Reduction) -> list[Any]:
    """Reduce each tensor over all ranks, and return this rank's rows of each."""
    if _is_followed(tensors):
        return list(_Reducescatter.apply(reduction, call, *tensors))
    return _reduce(Kind.reducescatter, tensors, call, reduction)


def allgather_all(tensors: Sequence[Any], call: Call) -> list[Any]:
    """Concatenate each tensor with those of all ranks."""
    if _is_followed(tensors):
        return list(_Allgather.apply(call, *tensors))
    return _gather(tensors, call)


def broadcast_from(root: int, tensor: Any, call: Call) -> Any:
    """Return the root's tensor."""
    if _is_followed([tensor]):
        return _Broadcast.apply(root, call, tensor)
    return _broadcast(root, tensor, call)


def alltoall_rows(tensor: Any, splits: Any, call: Call) -> tuple[Any, Any]:
    """Return the rows that the ranks send to this one, and the number of rows from each."""
    if _is_followed([tensor]):
        result, received = _Alltoall.apply(splits, call, tensor)
        return result, received
    return start_alltoall(tensor, splits, call, waits=True).wait()


def start_reductions(
    kind: Kind, tensors: Sequence[Any], call: Call, reduction: Reduction, **how: Any
) -> Handle:
    """Submit tensors for a reduction; waiting returns the list of results, or the single result if they are no
    group.
    """
    check_tensors(tensors)
    how["process_set"] = call.process_set
    if call.is_group:
        return start_grouped_reductions(kind, tensors, call.name, reduction, **how)
    return start_reduction(kind, tensors[0], call.name, reduction, **how)


def start_gather(tensors: Sequence[Any], call: Call, waits: bool = False) -> Handle:
    """Submit tensors for an all-gather; waiting returns results as that of `start_reductions`."""
    check_tensors(tensors)
    how: dict[str, Any] = dict(name=call.name, waits=waits, process_set=call.process_set)
    if call.is_group:
        return start_group(Kind.allgather, tensors, **how)
    return start(Kind.allgather, tensors[0], **how)


def start_alltoall(tensor: Any, splits: Any, call: Call, waits: bool = False) -> Received:
    """Submit a tensor for an all-to-all. `splits`: the number of rows for each rank, a tensor or integers, or None."""
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    how: dict[str, Any] = dict(name=call.name, waits=waits, process_set=call.process_set)
    return Received(start(Kind.alltoall, tensor, splits=counts, **how), splits)


def _reduce(kind: Kind, tensors: Sequence[Any], call: Call, reduction: Reduction) -> list[Any]:
    return _listed(call, start_reductions(kind, tensors, call, reduction, waits=True).wait())


def _gather(tensors: Sequence[Any], call: Call) -> list[Any]:
    return _listed(call, start_gather(tensors, call, waits=True).wait())


def _broadcast(root: int, tensor: Any, call: Call) -> Any:
    how: dict[str, Any] = dict(name=call.name, waits=True, process_set=call.process_set)
    return start(Kind.broadcast, tensor, root=root, **how).wait()


def _listed(call: Call, result: Any) -> list[Any]:
    return result if call.is_group else [result]


def _is_followed(tensors: Sequence[Any]) -> bool:
    check_tensors(tensors)
    return any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled()


def _refuse_unless_linear(operation: str, op: ReduceOp) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(f"{operation} with op={op.name} has no gradient; Sum and Average have")


class _Allreduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, reduction: Reduction, call: Call, *tensors: Any) -> tuple[Any, ...]:
        ctx.reduction, ctx.call = reduction, call
        return tuple(_reduce(Kind.allreduce, tensors, call, reduction))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        _refuse_unless_linear("allreduce", ctx.reduction.op)
        return (None, None, *allreduce_all(gradients, ctx.call.of_gradient(), ctx.reduction))


class _Reducescatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, reduction: Reduction, call: Call, *tensors: Any) -> tuple[Any, ...]:
        ctx.reduction, ctx.call = reduction, call
        return tuple(_reduce(Kind.reducescatter, tensors, call, reduction))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        op, prescale, postscale = ctx.reduction
        _refuse_unless_linear("reducescatter", op)
        factor = prescale * postscale * (size_of(ctx.call.process_set) if op == Sum else 1)
        if factor != 1:
            gradients = tuple(gradient * factor for gradient in gradients)
        return (None, None, *allgather_all(gradients, ctx.call.of_gradient()))


class _Allgather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Any, ...]:
        ctx.call, ctx.shapes = call, [tuple(tensor.shape) for tensor in tensors]
        return tuple(_gather(tensors, call))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call, place = ctx.call.of_gradient(), place_in(ctx.call.process_set)
        counts = [shape[0] if shape else 1 for shape in ctx.shapes]
        name = None if call.name is None else f"{call.name}.rows"
        of_rows = call._replace(name=name, is_group=False)
        (told,) = _gather([torch.tensor([[place, *counts]])], of_rows)  # [ranks, 1 + tensors]
        offsets = told[told[:, 0] < place, 1:].sum(dim=0).tolist()  # ranks that have joined send nothing
        means = allreduce_all(gradients, call, Reduction(Average))
        shares = [
            mean.narrow(0, offset, count).reshape(shape)
            for mean, offset, count, shape in zip(means, offsets, counts, ctx.shapes)
        ]
        return (None, *shares)


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, root: int, call: Call, tensor: Any) -> Any:
        ctx.root, ctx.call = root, call
        return _broadcast(root, tensor, call)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (mean,) = allreduce_all([gradient], ctx.call.of_gradient(), Reduction(Average))
        return None, None, mean if rank() == ctx.root else torch.zeros_like(mean)


class _Alltoall(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, splits: Any, call: Call, tensor: Any) -> tuple[Any, Any]:
        result, received = start_alltoall(tensor, splits, call, waits=True).wait()
        ctx.call, ctx.received = call, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> tuple[Any, ...]:
        returned, _ = alltoall_rows(gradient, ctx.received, ctx.call.of_gradient())
        return None, None, returned
