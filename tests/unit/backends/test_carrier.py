"""Reductions in the forms in which they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ronde.backends.carrier import form_of, typed
from ronde.types import Adasum, Average, BitXor, DType, Max, Min, Product, ReduceOp, Sum

Array = np.ndarray[Any, Any]

CARRIED = {
    *((bits, op) for bits in (DType.int32, DType.int64) for op in ReduceOp if op is not Average),
    *((bits, op) for bits in (DType.float32, DType.float64) for op in (Sum, Product)),
    *((bits, Product) for bits in (DType.complex64, DType.complex128)),
    *((DType.int8, op) for op in (Min, Max, BitXor)),
}


def reduce(inputs: list[Any], dtype: DType, op: ReduceOp) -> Any:
    """The result of a library: the form's operation, on bytes that it takes for numbers of the form's type."""
    form = form_of(dtype, op, len(inputs))
    given = [x.copy().view(np.uint8) for x in inputs]
    packed = [form.pack(typed(x, dtype)) if form.pack is not None else x.view(form.dtype.name) for x in given]
    assert all(x.dtype == np.dtype(form.dtype.name) for x in packed)
    ufunc = {Sum: np.add, Product: np.multiply, Min: np.minimum, Max: np.maximum}[form.op]
    carried = ufunc.reduce(packed, axis=0, dtype=packed[0].dtype)
    out = np.empty_like(given[0]) if form.pack is not None else carried.view(np.uint8)
    if form.unpack is not None:
        form.unpack(carried, typed(out, dtype))
    return typed(out, dtype)


def test_backends_meet_only_the_forms_they_are_told_of() -> None:
    for dtype in DType:
        for op in ReduceOp:
            if op is Adasum:  # which the native data plane makes by itself
                continue
            if dtype >= DType.complex64 and op not in (Sum, Product, Average):
                continue
            if DType.float16 <= dtype <= DType.float64 and op > Product:
                continue
            form = form_of(dtype, op, 3)
            assert (form.dtype, form.op) in CARRIED, (dtype, op)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_nan_wins_and_numbers_keep_their_order(name: str) -> None:
    limits: Any = np.finfo(name)
    special: list[float] = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, limits.tiny, limits.max]
    a, b = (x.ravel().astype(name) for x in np.meshgrid(special, special))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(reduce([a, b], DType[name], Max), np.maximum(a, b))
        np.testing.assert_array_equal(reduce([a, b], DType[name], Min), np.minimum(a, b))


def test_bfloat16_is_rounded_to_the_nearest_and_to_even() -> None:
    wide = np.array([1.0, 1.00390625, 1.01171875, 3.0e38, -2.5], np.float32)
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    one = np.full(5, 0x3B80, np.uint16)  # 2**-8: half of the last place of 1.0
    total = reduce([bits, one], DType.bfloat16, Sum)
    expected = [0x3F80, 0x3F80, 0x3F82, bits[3], bits[4]]  # to even: down, down from 1.0039, up
    assert total.tolist()[0] == expected[0]
    assert total.tolist()[3:] == expected[3:]
    assert reduce([np.array([0x7FC1], np.uint16), one[:1]], DType.bfloat16, Sum)[0] & 0x7FC0 == 0x7FC0


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
def test_integers_wrap_around_and_keep_their_order(name: str) -> None:
    limits = np.iinfo(name)
    values = np.array([limits.min, limits.min + 1, 0, 1, limits.max // 2 + 1, limits.max], name)
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    for op, ufunc in ((Sum, np.add), (Product, np.multiply), (Max, np.maximum), (Min, np.minimum)):
        np.testing.assert_array_equal(reduce([a, b], DType[name], op), ufunc(a, b))


@pytest.mark.parametrize("name", ["int8", "int32", "int64"])
def test_averages_of_integers_are_cut_off_towards_zero(name: str) -> None:
    a, b = np.array([1, -1, 3, -3, 0, -4], name), np.array([0, 0, 2, -2, 0, 2], name)
    assert reduce([a, b], DType[name], Average).tolist() == [0, 0, 2, -2, 0, -1]
