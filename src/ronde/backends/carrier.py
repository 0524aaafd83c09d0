"""Connects the native engine with a backend: converts bytes to numbers in a form that every backend supports.

Libraries differ in the element types that they support, in the effect of a NaN on Min and Max, and in the precision of
16-bit sums. So a reduction is *carried* in another form where necessary, with the same result, and backends in main
memory get only these:

    every ReduceOp but Average of int32 and int64; Sum and Product of float32 and float64; Product of complex numbers;
    Min, Max and BitXor of int8

  - Average is a sum, divided afterwards. Integers of up to 32 bits are summed as int64; larger ones as two int64, of
    their upper and their lower half, so that no sum wraps around. The quotient is truncated toward zero.
  - 16-bit floats are widened to float32 and rounded once at the end. 8-bit and 16-bit integers are widened to int32
    (Open MPI's sum of 8-bit integers saturates instead of wrapping around).
  - The sum of complex numbers is that of their parts.
  - bool: Sum and Max are "any", Product and Min are "all".
  - Unsigned integers wrap around as signed ones do; where order matters, the highest bit is flipped.
  - Min and Max of floats are those of integers in the same order, with NaN at the end that wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ronde.backends.backend import Backend, DeviceBackend
from ronde.types import (
    Allreduce,
    Average,
    BitAnd,
    BitOr,
    DType,
    Kind,
    Max,
    Min,
    Product,
    ReduceOp,
    Reducescatter,
    Sum,
)

__all__ = [
    "Carrier",
    "DeviceCarrier",
    "Form",
    "form_of",
    "typed",
]


Array = Any  # of NumPy, with one axis


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


# Forms of reductions


class Form(NamedTuple):
    """The form of a reduction: `op` of `dtype` values, `parts` of them for each element.

    `pack` returns a new array of these values; None: the memory itself, viewed in that type. `unpack(carried, out)`
    writes the result to `out`, the same memory if nothing was packed; None: the result is there already.
    """

    dtype: DType
    op: ReduceOp
    parts: int
    pack: Callable[[Array], Array] | None
    unpack: Callable[[Array, Array], None] | None


def typed(data: Array, dtype: DType) -> Array:
    """Return the bytes as numbers, bfloat16 as the uint16 of its bits, because NumPy has no bfloat16."""
    return data.view(np.uint16 if dtype is DType.bfloat16 else dtype.name)


def form_of(dtype: DType, op: ReduceOp, divisor: int) -> Form:
    """Return the form of a reduction that the native data plane supports. `divisor`: of an average."""
    if op is Average:
        if DType.uint8 <= dtype <= DType.int64:
            return _averaged_integers(dtype, divisor)
        return _averaged(form_of(dtype, Sum, divisor), divisor)
    if dtype in (DType.float16, DType.bfloat16):
        narrow, widen = (_to_half, _half) if dtype is DType.float16 else (_to_bfloat16, _bfloat16)
        return _wrapped(form_of(DType.float32, op, divisor), widen, narrow)
    if dtype is DType.bool:
        return Form(DType.int8, _of_truth(op), 1, lambda x: (x.view(np.uint8) != 0).view(np.int8), _to_bool)
    if dtype in (DType.complex64, DType.complex128) and op is Sum:
        return Form(DType.float32 if dtype is DType.complex64 else DType.float64, Sum, 2, None, None)
    if dtype in (DType.float32, DType.float64) and op in (Min, Max):
        return _ordered_floats(dtype, op)
    if dtype.itemsize < 4:
        return Form(DType.int32, op, 1, lambda x: x.astype(np.int32), _narrowed)
    signed = _SIGNED.get(dtype)
    if signed is not None:
        if op not in (Min, Max):
            return Form(signed, op, 1, None, None)
        highest = np.array(1 << (8 * dtype.itemsize - 1), dtype.name)
        return Form(
            signed,
            op,
            1,
            lambda x: (x ^ highest).view(signed.name),
            lambda carried, out: np.bitwise_xor(carried.view(dtype.name), highest, out=out),
        )
    return Form(dtype, op, 1, None, None)


_SIGNED = {DType.uint32: DType.int32, DType.uint64: DType.int64}


def _averaged(summed: Form, divisor: int) -> Form:
    after = summed.unpack

    def unpack(carried: Array, out: Array) -> None:
        np.true_divide(carried, carried.dtype.type(divisor), out=carried)
        if after is not None:
            after(carried, out)

    return summed._replace(unpack=unpack)


def _averaged_integers(dtype: DType, divisor: int) -> Form:
    def cut_off(quotients: Array, is_inexact: Array) -> Array:
        return quotients + (is_inexact & (quotients < 0))

    def unpack(carried: Array, out: Array) -> None:
        out[:] = cut_off(carried // divisor, carried % divisor != 0).astype(out.dtype)

    if dtype.itemsize < 8:
        return Form(DType.int64, Sum, 1, lambda x: x.astype(np.int64), unpack)

    def halves(x: Array) -> Array:
        return np.stack([(x >> 32).view(np.int64), (x & 0xFFFFFFFF).view(np.int64)], axis=1).reshape(-1)

    def unpack_halves(carried: Array, out: Array) -> None:
        upper, rest = np.divmod(carried[::2], divisor)
        rest = (rest << 32) + carried[1::2]
        # An unsigned one may have the highest bit.
        quotients = ((upper << 32) + rest // divisor).view(out.dtype)
        out[:] = cut_off(quotients, rest % divisor != 0).astype(out.dtype)

    return Form(DType.int64, Sum, 2, halves, unpack_halves)


def _wrapped(inner: Form, widen: Callable[[Array], Array], narrow: Callable[[Array, Array], None]) -> Form:
    """Return the form for numbers that are widened to the type of `inner`."""
    before, after = inner.pack, inner.unpack

    def pack(x: Array) -> Array:
        wide = widen(x)
        return wide if before is None else before(wide)

    def unpack(carried: Array, out: Array) -> None:
        wide = carried
        if after is not None:
            wide = np.empty(len(out), np.float32)
            after(carried, wide)
        narrow(wide, out)

    return inner._replace(pack=pack, unpack=unpack)


def _half(x: Array) -> Array:
    return x.astype(np.float32)


def _to_half(wide: Array, out: Array) -> None:
    with np.errstate(over="ignore"):  # overflow gives infinity
        out[:] = wide


def _bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(wide: Array, out: Array) -> None:
    """Round to the nearest value, ties to even; a NaN stays a NaN."""
    bits = wide.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    out[:] = np.where(np.isnan(wide), bits | 0x00400000, rounded) >> 16


def _narrowed(carried: Array, out: Array) -> None:
    out[:] = carried.astype(out.dtype)


def _of_truth(op: ReduceOp) -> ReduceOp:
    return {Sum: Max, Product: Min, BitOr: Max, BitAnd: Min}.get(op, op)


def _to_bool(carried: Array, out: Array) -> None:
    out.view(np.uint8)[:] = carried.view(np.uint8)


def _ordered_floats(dtype: DType, op: ReduceOp) -> Form:
    bits = DType.int32 if dtype is DType.float32 else DType.int64
    limits = np.iinfo(bits.name)
    winner = limits.max if op is Max else limits.min  # both are a NaN as a float

    def swap(numbers: Array) -> Array:
        """Reverse the order of negative floats, which is opposite to that of their bits. It is its own inverse."""
        return numbers ^ ((numbers >> (limits.bits - 1)) & limits.max)

    def pack(x: Array) -> Array:
        return np.where(np.isnan(x), winner, swap(x.view(bits.name)))

    def unpack(carried: Array, out: Array) -> None:
        out.view(bits.name)[:] = swap(carried)

    return Form(bits, op, 1, pack, unpack)
