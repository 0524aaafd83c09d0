"""Connects the native engine with a backend: converts bytes to numbers in a form that the backend supports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ronde.backends.base import Backend, DeviceBackend
from ronde.backends.numbers import form_of, typed
from ronde.types import (
    Allreduce,
    Average,
    DType,
    Kind,
    Max,
    Min,
    Product,
    ReduceOp,
    Reducescatter,
    Sum,
)

__all__ = ["Carrier", "DeviceCarrier"]


class Carrier:
    """Carries operations for cpp/binding/backend.cc, which passes memory as arrays of bytes, and enums as numbers.

    `divisor`: of an average, the number of ranks that contribute.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        """Whether the backend carries this, in whatever form."""
        if kind is Allreduce or kind is Reducescatter:
            form = form_of(dtype, op, self._backend.place.size)
            return self._backend.is_enabled(kind, form.dtype, form.op)
        return self._backend.is_enabled(kind, dtype, op)

    def allreduce(self, x: Any, out: Any, dtype: int, op: int, divisor: int) -> None:
        given, form = DType(dtype), form_of(DType(dtype), ReduceOp(op), divisor)
        if form.pack is None:
            place = out.view(form.dtype.name)
            self._backend.allreduce(place if x is out else x.view(form.dtype.name), place, form.op)
            carried = place
        else:
            carried = form.pack(typed(x, given))
            self._backend.allreduce(carried, carried, form.op)
        if form.unpack is not None:
            form.unpack(carried, typed(out, given))

    def reducescatter(
        self, x: Any, out: Any, counts: Sequence[int], dtype: int, op: int, divisor: int
    ) -> None:
        given, form = DType(dtype), form_of(DType(dtype), ReduceOp(op), divisor)
        if form.pack is None:
            carried, share = _apart(x, out).view(form.dtype.name), out.view(form.dtype.name)
        else:
            carried = form.pack(typed(x, given))
            share = np.empty(counts[self._backend.place.rank] * form.parts, carried.dtype)
        self._backend.reducescatter(carried, share, [count * form.parts for count in counts], form.op)
        if form.unpack is not None:
            form.unpack(share, typed(out, given))

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        if sum(sizes):
            self._backend.allgather(_apart(x, out), out, sizes)

    def broadcast(self, data: Any, root: int) -> None:
        if data.size:
            self._backend.broadcast(data, root)

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        self._backend.alltoall(x, in_sizes, out, out_sizes)

    def barrier(self) -> None:
        self._backend.barrier()


def _apart(x: Any, out: Any) -> Any:
    """Return the input, or a copy if the result overlaps it, which libraries do not support."""
    return x.copy() if np.may_share_memory(x, out) else x


class DeviceCarrier:
    """Carries operations on the memory of a device: its arrays have an address, but the processor cannot read them.

    An average is the library's, over all ranks: every rank contributes to tensors in a device's memory.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        """Whether the backend carries this, in whatever form."""
        if kind is Allreduce or kind is Reducescatter:
            dtype, op, _ = _device_form(dtype, op)
        return self._backend.is_enabled(kind, dtype, op)

    def allreduce(self, x: Any, out: Any, dtype: int, op: int, divisor: int) -> None:
        carried, carried_op, _ = _device_form(DType(dtype), ReduceOp(op))
        result = self._view(out, carried)
        self._backend.allreduce(result if x is out else self._view(x, carried), result, carried_op)

    def reducescatter(
        self, x: Any, out: Any, counts: Sequence[int], dtype: int, op: int, divisor: int
    ) -> None:
        carried, carried_op, parts = _device_form(DType(dtype), ReduceOp(op))
        shares = [count * parts for count in counts]
        self._backend.reducescatter(self._view(x, carried), self._view(out, carried), shares, carried_op)

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        if sum(sizes):
            self._backend.allgather(self._view(x), self._view(out), sizes)

    def broadcast(self, data: Any, root: int) -> None:
        if data.size:
            self._backend.broadcast(self._view(data), root)

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        self._backend.alltoall(self._view(x), in_sizes, self._view(out), out_sizes)

    def _view(self, data: Any, dtype: DType = DType.uint8) -> Any:
        return self._backend.view(data.__array_interface__["data"][0], data.size, dtype)


def _device_form(dtype: DType, op: ReduceOp) -> tuple[DType, ReduceOp, int]:
    """Return the type and reduction to carry, and how many numbers make an element."""
    if dtype is DType.bool:
        return DType.uint8, {Sum: Max, Product: Min}.get(op, op), 1
    if dtype in (DType.complex64, DType.complex128) and op in (Sum, Average):
        return DType.float32 if dtype is DType.complex64 else DType.float64, op, 2
    return dtype, op, 1
