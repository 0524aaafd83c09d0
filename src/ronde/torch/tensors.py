"""Submits tensors of PyTorch to the engine: on any device, dense or sparse, alone or in a group.

Dense tensors:
  1. The engine takes tensors on the CPU as they are, with any layout. It takes a tensor of a CUDA device in place if a
     backend carries it there (ronde/backends/nccl.py). Its native side cannot access that memory, so PyTorch applies
     factors, and the average of integers, before the tensor is submitted and after it returns.
  2. Any other tensor travels through main memory: a copy there is submitted, and the result is copied back by the
     thread that waits.

Groups of dense tensors have one name, so they complete together or not at all:
  3. The engine takes tensors on the CPU, and copies of the others, in one group. Each rank must have them on devices of
     the same types: the name of the group's device is "cpu", "cuda", or, for several types, all of them in order
     ("cpu+cuda"), which ranks compare. If a backend carries all tensors on their device, the engine takes them one by
     one, under the group's name, a dot and the position.

Sparse tensors: the ranks gather positions and values, and add up values at the same position.
  4. Positions and values are all-gathered as one group, under the tensor's own name, so that a rank with a dense tensor
     of that name gets a mismatch.
  5. Before its positions, each rank sends two rows of negative numbers, counting down from -1: the shape, so that all
     ranks notice different shapes, and its rank. Ranks that have joined send nothing.
  6. Values of 16 bits are added in 32 bits and rounded once, as those of dense tensors are. Averages of integers are
     added in int64.
  7. Sparse tensors of a group are gathered, each under a separate name, while the dense ones travel together. The
     group's own name reveals whether the ranks' groups differ, so waiting begins with it: the rest may then never
     complete. (If a tensor is sparse on some ranks only, it stays in flight there, under the name of the group, a dot
     and its position, and these ranks cannot use that name again.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ronde.backends import nccl
from ronde.comm.world import rank
from ronde.engine import engine
from ronde.engine.process import ProcessSet, global_process_set
from ronde.errors import MismatchError, UsageError
from ronde.torch.call import Call, size_of
from ronde.torch.handles import CompletedHandle, Group, Handle
from ronde.types import Allgather, Allreduce, Average, Broadcast, DType, ReduceOp, Sum

__all__ = [
    "SparseHandle",
    "check_tensors",
    "is_carried",
    "places_of",
    "sparse_allreduce_async",
    "staged",
    "staged_group",
    "start_dense",
    "start_on_device",
    "start_tensor",
    "start_tensors",
]


def start_tensor(call: Call, tensor: Any) -> Handle[Any]:
    """Submit a tensor for an all-reduce, or a dense tensor for any operation."""
    if call.kind is Allreduce and getattr(tensor, "is_sparse", False):
        return start_sparse(call, tensor)
    return start_dense(call, tensor)


def start_tensors(call: Call, tensors: Sequence[Any]) -> Handle[Any]:
    """Submit a group for an all-reduce, or of dense tensors for any operation; waiting returns the list of results."""
    tensors = list(tensors)
    check_tensors(tensors)
    sparse = [index for index, tensor in enumerate(tensors) if tensor.is_sparse]
    if not sparse or call.kind is not Allreduce:
        return start_group(call, tensors)
    dense = [index for index, tensor in enumerate(tensors) if not tensor.is_sparse]
    group = None
    if dense:
        later = call._replace(waits=False)  # the sparse ones are submitted before anything is waited for
        group = start_group(later, [tensors[index] for index in dense], places_of(tensors))
    others: dict[int, Handle[Any]] = {}
    for index in sparse:
        # Without dense tensors, the first one takes the group's name, so that a rank with dense ones gets a mismatch.
        is_named = call.name is None or (not dense and index == sparse[0])
        each = call if is_named else call._replace(name=f"{call.name}.{index}")
        others[index] = start_sparse(each, tensors[index])
    return _MixedGroup(group, dense, others)


class _MixedGroup:
    """A group in which some tensors are sparse."""

    def __init__(
        self, group: Handle[Any] | None, dense: Sequence[int], others: dict[int, Handle[Any]]
    ) -> None:
        self._group, self._dense, self._others = group, dense, others

    def wait(self) -> list[Any]:
        results = {} if self._group is None else dict(zip(self._dense, self._group.wait(), strict=True))
        results |= {index: handle.wait() for index, handle in self._others.items()}
        return [results[index] for index in range(len(results))]

    def done(self) -> bool:
        handles = [*self._others.values(), *([] if self._group is None else [self._group])]
        return all(handle.done() for handle in handles)


def check_tensors(tensors: Iterable[Any]) -> None:
    """Raise UsageError unless all of them are tensors."""
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            raise _no_tensor(each)


def _no_tensor(given: object) -> UsageError:
    if given is None:
        return UsageError(
            "None is not a tensor: a parameter has the gradient None until its first backward pass and after "
            "zero_grad(); leave it out on all ranks, or give torch.zeros_like(parameter)"
        )
    if isinstance(given, Mapping):
        return UsageError(
            f"expected a tensor, not a {type(given).__name__}; broadcast_parameters() takes a state_dict, and "
            "broadcast_object() any object"
        )
    return UsageError(
        f"expected a tensor, not {given!r:.60}; torch.as_tensor() makes one of numbers and arrays"
    )


# Dense tensors


def start_dense(call: Call, tensor: Any) -> Handle[Any]:
    """Submit a dense tensor to the engine. Raises UsageError unless it is one, and the errors of `Engine.submit`."""
    if not isinstance(tensor, torch.Tensor):
        raise _no_tensor(tensor)
    if tensor.is_cpu:
        return call.submit(tensor, tensor if call.in_place else None)
    if tensor.is_cuda and is_carried(call, tensor):
        return start_on_device(call, tensor)
    return staged(call, tensor)


def staged(call: Call, tensor: Any) -> Handle[Any]:
    """Submit a copy of the tensor in main memory; waiting copies the result to the tensor's device."""
    copy = copied(tensor.detach())
    # Only this operation uses the copy, so the result may overwrite it if it has the same shape.
    keeps_shape = call.kind is Allreduce or call.kind is Broadcast
    handle = call.submit(copy, copy if keeps_shape else None, tensor.device.type)
    return CompletedHandle(handle, partial(_moved_back, call, tensor))


def _moved_back(call: Call, tensor: Any, result: Any) -> Any:
    """Return the result on the tensor's device: in the tensor itself, or in a new one."""
    if not call.in_place:
        return result.to(tensor.device)
    tensor.detach().copy_(result)
    return tensor


def copied(tensor: Any) -> Any:
    """Return a copy in main memory; of a CUDA tensor in pinned memory, which the device accesses directly."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(tensor.device))
    there.synchronize()
    return copy


# Dense tensors in the memory of a device


def is_carried(call: Call, tensor: Any) -> bool:
    """Return whether a backend takes the tensor in place; the same on all ranks."""
    dtype = DType.__members__.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or tensor.layout is not torch.strided:
        return False
    op = _carried(tensor, call.op)
    return engine(call.process_set).carries(call.kind, dtype, op, tensor.device)


def start_on_device(call: Call, tensor: Any) -> CompletedHandle:
    """Submit the tensor without a copy in main memory; return its handle."""
    kind, _, _, op, prescale, postscale, in_place, *_ = call
    given = tensor.detach().resolve_conj().resolve_neg().contiguous()
    x = given.to(_working_type(tensor, op, prescale != 1.0 or postscale != 1.0))
    if prescale != 1.0:
        x = _scaled(x, prescale)
    keeps_shape = kind is Allreduce or kind is Broadcast
    result = None
    if keeps_shape:
        is_ours = x.data_ptr() != tensor.data_ptr()
        # A broadcast runs in the memory of its input. So does an all-reduce if the program does not need the input.
        result = x if in_place or is_ours else (torch.empty_like(x) if kind is Allreduce else x.clone())
        x = result if kind is Broadcast else x
    nccl.make_ready(*([x] if result is None or result is x else [x, result]))
    unscaled = call._replace(op=_carried(tensor, op), prescale=1.0, postscale=1.0)
    handle = unscaled.submit(x, result, f"{tensor.device.type} memory")

    final: list[Any] = []

    def finish(reduced: Any) -> Any:
        # It may run again after an interrupt, so `reduced`, which may be the tensor, stays until `final` is set.
        if not final:
            value = reduced
            if op is Average and not _divides(tensor):
                value = torch.div(value, engine(call.process_set).size, rounding_mode="trunc")
            if postscale != 1.0:
                value = _scaled(value, postscale)
            final.append(value.to(tensor.dtype))
        if not in_place:
            return final[0]
        if final[0].data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(final[0])
        return tensor

    return CompletedHandle(handle, finish)


def _carried(tensor: Any, op: ReduceOp) -> ReduceOp:
    return Sum if op is Average and not _divides(tensor) else op


def _divides(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _working_type(tensor: Any, op: ReduceOp, is_rounded: bool) -> Any:
    """Return the type in which a reduction neither wraps around nor rounds early, as in the engine.

    `is_rounded`: PyTorch scales or adds the numbers, and would round each time.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16) and is_rounded:
        return torch.float32
    return torch.int64 if op is Average and not _divides(tensor) else tensor.dtype


def _scaled(tensor: Any, factor: float) -> Any:
    if _divides(tensor):
        return tensor * factor
    return tensor.clone() if tensor.dtype is torch.bool else scaled_integers(tensor, factor)


def scaled_integers(tensor: Any, factor: float) -> Any:
    """Scale as the engine does, except for products with fractions from 2**53 on, which are those of float64."""
    factor = float(factor)
    if factor.is_integer():
        modulus = 1 << 64  # products wrap around, and so may the factor
        return tensor * ((int(factor) + modulus // 2) % modulus - modulus // 2)
    return (tensor.double() * factor).to(tensor.dtype)


# Groups of dense tensors


def start_group(call: Call, tensors: Sequence[Any], places: str | None = None) -> Handle[Any]:
    """Submit tensors as one group (see Engine.submit_group); waiting returns the list of results.

    `places`: the devices of the user's whole group, if `tensors` are a part of it.
    """
    device = places_of(tensors) if places is None else places
    is_elsewhere = [not tensor.is_cpu for tensor in tensors]
    if tensors and all(tensor.is_cuda and is_carried(call, tensor) for tensor in tensors):
        names = [None if call.name is None else f"{call.name}.{index}" for index in range(len(tensors))]
        return Group(
            [
                start_on_device(call._replace(name=name, waits=False), tensor)
                for tensor, name in zip(tensors, names)
            ]
        )
    if any(is_elsewhere):
        return staged_group(call, tensors, is_elsewhere, device)
    return call.submit_group(tensors, tensors if call.in_place else None, device)


def staged_group(call: Call, tensors: Sequence[Any], is_staged: Sequence[bool], device: str) -> Handle[Any]:
    """Submit copies of some tensors in main memory, and the others; waiting copies results to the tensors' devices."""
    pairs = list(zip(tensors, is_staged, strict=True))
    sent = [copied(tensor.detach()) if staged else tensor for tensor, staged in pairs]
    outs = None
    if call.kind is Allreduce:  # only this operation uses a copy, so the result may overwrite it
        outs = [copy if staged or call.in_place else None for copy, (_, staged) in zip(sent, pairs)]

    def finish(results: list[Any]) -> list[Any]:
        return [
            _moved_back(call, tensor, result) if staged else result
            for (tensor, staged), result in zip(pairs, results, strict=True)
        ]

    return CompletedHandle(call.submit_group(sent, outs, device), finish)


def places_of(tensors: Sequence[Any]) -> str:
    """Return the device type of the tensors, or of each tensor if they differ; a sparse tensor counts as "sparse"."""
    places = ["sparse" if tensor.is_sparse else tensor.device.type for tensor in tensors]
    return places[0] if len(set(places)) == 1 else "+".join(places) or "cpu"


# Sparse tensors


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
    return start_sparse(Call(Allreduce, name, process_set, op), tensor)


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
        gather = Call(Allgather, call.name, call.process_set, is_group=True)
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
        wide = values if values.dtype is torch.bool else values.to(_working_type(values, self._op, True))
        # The positions come from checked tensors, and need no second check.
        total = torch.sparse_coo_tensor(
            rows[~is_head].t(), wide, self._tensor.shape, check_invariants=False
        ).coalesce()
        self._scale(total.values(), self._size if self._divides_by_all else len(shapes))
        return total.to(values.dtype)

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
        if _divides(values):
            factor = self._factor / (contributors if self._op is Average else 1)
            if factor != 1:
                values.mul_(factor)
            return
        if self._factor != 1:
            values.copy_(scaled_integers(values, self._factor))
        if self._op is Average:
            values.copy_(values.div(contributors, rounding_mode="trunc"))
