"""Sparse tensors: the ranks gather positions and values, and add up values at the same position.

The rules:
  1. Positions and values are all-gathered as one group, under the tensor's own name, so that a rank with a dense tensor
     of that name gets a mismatch.
  2. Before its positions, each rank sends two rows of negative numbers, counting down from -1: the shape, so that all
     ranks notice different shapes, and its rank. Ranks that have joined send nothing.
  3. Values of 16 bits are added in 32 bits and rounded once, as those of dense tensors are. Averages of integers are
     added in int64.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ronde.comm.world import rank
from ronde.engine import engine
from ronde.engine.process import global_process_set
from ronde.engine.process_sets import ProcessSet
from ronde.errors import MismatchError, UsageError
from ronde.torch.call import Call
from ronde.torch.groups import start_group
from ronde.torch.handles import check_tensors
from ronde.torch.members import size_of
from ronde.torch.on_device import scaled_integers
from ronde.types import Average, Kind, ReduceOp, Sum

__all__ = ["SparseHandle", "sparse_allreduce_async", "start_sparse"]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet | None = global_process_set,
) -> SparseHandle:
    """Start to combine the sparse (COO) tensors of all ranks, and return a handle.

    `synchronize(handle)` or `handle()` returns a coalesced sparse tensor of the same shape, dtype and device. All ranks
    of the process set call it, with the same name.

    Args:
        tensor: a sparse COO tensor; ranks may have different numbers of values, and none. Missing values count as zero.
        name: the same on all ranks, and of one operation at a time (None: numbered in program order).
        op: hvd.Average or hvd.Sum (default: Average).
        process_set: the ranks that take part (default: all ranks).

    Raises:
        UsageError: another `op` or layout.
        MismatchError: shapes or dtypes differ between ranks; raised by `synchronize`.
    """
    return start_sparse(Call(Kind.allreduce, name, process_set, op), tensor)


def start_sparse(call: Call, tensor: Any) -> SparseHandle:
    """Submit a sparse tensor for an all-reduce."""
    check_tensors((tensor,))
    op = call.op
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(
            f"a tensor of layout {tensor.layout} is not a sparse COO tensor; convert it with to_sparse()"
        )
    if op not in (Sum, Average):
        raise UsageError(
            f"a sparse tensor cannot be reduced with op={op.name}; use Sum or Average, or convert it with to_dense()"
        )
    if tensor.sparse_dim() == 0:
        raise UsageError(
            "a sparse tensor without a sparse dimension cannot be reduced; make it dense with to_dense()"
        )
    return SparseHandle(call, tensor)


class SparseHandle:
    """The handle of a sparse tensor in flight."""

    def __init__(self, call: Call, tensor: Any) -> None:
        self._tensor, self._name, self._in_place = tensor, call.name, call.in_place
        self._op, self._factor = call.op, call.prescale * call.postscale
        self._size, self._divides_by_all = size_of(call.process_set), engine(call.process_set).divides_by_all
        self._combining = threading.RLock()
        self._result: Any = None
        mine = tensor.detach().coalesce()
        dims = tensor.sparse_dim()
        head = torch.tensor([tensor.shape[:dims], [rank()] * dims], device=tensor.device)
        positions = torch.cat([-1 - head, mine.indices().t()])
        gather = Call(Kind.allgather, call.name, call.process_set, is_group=True)
        self._handle = start_group(gather, [positions, mine.values()])

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it; see `handles.Handle`."""
        try:
            positions, values = self._handle.wait()
        except MismatchError as error:
            error.add_note("(This rank has a sparse tensor, of which positions and values are gathered.)")
            raise
        with self._combining:
            if self._result is None:
                self._result = self._completed(positions, values)
        return self._result

    __call__ = wait  # Horovod's handles of sparse tensors are functions

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._handle.done()

    def _completed(self, positions: Any, values: Any) -> Any:
        result = self._combined(positions, values)
        if not self._in_place:
            return result
        with torch.no_grad():
            return self._tensor.copy_(result)

    def _combined(self, rows: Any, values: Any) -> Any:
        is_head = rows[:, 0] < 0
        heads = (-1 - rows[is_head]).tolist()
        shapes = {number: shape for shape, (number, *_) in zip(heads[::2], heads[1::2], strict=True)}
        self._check_alike(shapes)
        wide = values.to(self._working_type(values.dtype))
        # The positions come from checked tensors, and need no second check.
        total = torch.sparse_coo_tensor(
            rows[~is_head].t(), wide, self._tensor.shape, check_invariants=False
        ).coalesce()
        self._scale(total.values(), self._size if self._divides_by_all else len(shapes))
        return total.to(values.dtype)

    def _working_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which values are added, so that sums are rounded once and averages do not wrap around."""
        if dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        return torch.int64 if is_integer and self._op is Average else dtype

    def _check_alike(self, shapes: dict[int, list[int]]) -> None:
        (first, expected), *others = shapes.items()
        for number, shape in others:
            if shape != expected:
                called = "a tensor without a name" if self._name is None else f"tensor '{self._name}'"
                raise MismatchError(
                    f"{called} is sparse with the sparse dimensions {tuple(expected)} on rank {first} and "
                    f"{tuple(shape)} on rank {number}: they must be the same on all ranks"
                )

    def _scale(self, values: Any, contributors: int) -> None:
        if values.is_floating_point() or values.is_complex():
            factor = self._factor / (contributors if self._op is Average else 1)
            if factor != 1:
                values.mul_(factor)
            return
        if self._factor != 1:
            values.copy_(scaled_integers(values, self._factor))
        if self._op is Average:
            values.copy_(values.div(contributors, rounding_mode="trunc"))
