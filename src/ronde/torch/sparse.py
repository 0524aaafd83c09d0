"""Sparse tensors: all ranks' positions and values are gathered, and what has the same position is added up.

The rules:
  1. Two all-gathers: the positions under the tensor's own name, so that a rank which has it dense is told of the
     difference, and the values under the name plus ".values".
  2. In front of its positions each rank sends one row that is negative: the shape, from which -1 counts downwards.
     Ranks whose shapes differ all find out.
  3. Values of 16 bits are added in 32 and rounded once, as those of dense tensors are.
"""

from __future__ import annotations

from typing import Any

import torch

from ronde.comm.queries import size
from ronde.errors import MismatchError, UsageError
from ronde.torch.handles import start
from ronde.types import Average, Kind, ReduceOp, Sum

__all__ = ["SparseHandle", "sparse_allreduce_async", "start_sparse"]


def sparse_allreduce_async(tensor: Any, name: str | None = None, op: ReduceOp = Average) -> SparseHandle:
    """Begin to combine the sparse (COO) tensors of all ranks, Sum or Average; what they leave out counts as zero.

    Ranks may have different numbers of values, and none. `synchronize(handle)`, or to call the handle, returns a
    coalesced sparse tensor of the same shape, type and device. Raises UsageError for other operations and layouts, and
    when it is waited for MismatchError if shapes or types differ.
    """
    return start_sparse(tensor, name=name, op=op)


def start_sparse(
    tensor: Any,
    *,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale: float = 1.0,
    postscale: float = 1.0,
    in_place: bool = False,
    waits: bool = False,
) -> SparseHandle:
    """Submit a sparse tensor; arguments as those of `handles.start`."""
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(
            f"a tensor of layout {tensor.layout} is not a sparse COO tensor; to_sparse() makes one"
        )
    if op not in (Sum, Average):
        raise UsageError(
            f"a sparse tensor cannot be reduced with op={op.name}; Sum and Average are possible, or to_dense()"
        )
    if tensor.sparse_dim() == 0:
        raise UsageError(
            "a sparse tensor without a sparse dimension cannot be reduced; make it dense with to_dense()"
        )
    return SparseHandle(tensor, name, op, prescale * postscale, in_place)


class SparseHandle:
    """A sparse tensor on its way."""

    def __init__(self, tensor: Any, name: str | None, op: ReduceOp, factor: float, in_place: bool) -> None:
        self._tensor, self._name, self._op, self._factor, self._in_place = tensor, name, op, factor, in_place
        self._result: Any = None
        mine = tensor.detach().coalesce()
        shape = torch.tensor([tensor.shape[: tensor.sparse_dim()]], device=tensor.device)
        positions = torch.cat([-1 - shape, mine.indices().t()])
        self._positions = start(Kind.allgather, positions, name=name)
        self._values = start(Kind.allgather, mine.values(), name=None if name is None else f"{name}.values")

    def wait(self) -> Any:
        """Return the result when it is there; see `handles.Handle`."""
        if self._result is None:
            try:
                positions = self._positions.wait()  # if this fails, the values may never come
            except MismatchError as error:
                error.add_note("(This rank has a sparse tensor, of which the positions are gathered.)")
                raise
            self._result = self._combined(positions, self._values.wait())
            if self._in_place:
                with torch.no_grad():
                    self._result = self._tensor.copy_(self._result)
        return self._result

    __call__ = wait  # Horovod's handles of sparse tensors are functions

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._positions.done() and self._values.done()

    def _combined(self, rows: Any, values: Any) -> Any:
        is_shape = rows[:, 0] < 0
        self._check_alike((-1 - rows[is_shape]).tolist())
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        # Positions are of tensors that have been checked, and need not be checked again.
        total = torch.sparse_coo_tensor(
            rows[~is_shape].t(), wide, self._tensor.shape, check_invariants=False
        ).coalesce()
        self._scale(total.values())
        return total.to(values.dtype)

    def _check_alike(self, shapes: list[list[int]]) -> None:
        for rank, shape in enumerate(shapes):
            if shape != shapes[0]:
                called = "a tensor without a name" if self._name is None else f"tensor '{self._name}'"
                raise MismatchError(
                    f"{called} is sparse with the sparse dimensions {tuple(shapes[0])} on rank 0 and {tuple(shape)} on "
                    f"rank {rank}: they must be the same on all ranks"
                )

    def _scale(self, values: Any) -> None:
        if values.is_floating_point() or values.is_complex():
            factor = self._factor / (size() if self._op is Average else 1)
            if factor != 1:
                values.mul_(factor)
            return
        if self._factor != 1:
            values.copy_((values.double() * self._factor).floor_())
        if self._op is Average:
            values.copy_(values.div(size(), rounding_mode="floor"))
