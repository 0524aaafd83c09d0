"""What ranks pass to an operation, and what NumPy makes of it: exactly, for these values, in whatever order."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import ronde

Array = npt.NDArray[Any]

INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)

UFUNCS: dict[Any, np.ufunc] = {
    ronde.Sum: np.add,
    ronde.Average: np.add,
    ronde.Product: np.multiply,
    ronde.Min: np.minimum,
    ronde.Max: np.maximum,
    ronde.BitAnd: np.bitwise_and,
    ronde.BitOr: np.bitwise_or,
    ronde.BitXor: np.bitwise_xor,
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def supports(name: str, op: Any) -> bool:
    """Whether the reduction makes sense for the type; see cpp/kernels/reduce.h."""
    if op is ronde.Average:
        return name != "bool"
    if op in (ronde.Min, ronde.Max):
        return name not in COMPLEX
    if op in (ronde.BitAnd, ronde.BitOr, ronde.BitXor):
        return name in ("bool", *INTEGERS)
    return True


def values(name: str, shape: tuple[int, ...], seed: int, rank: int, op: Any = None) -> Array:
    """What that rank passes."""
    rng = np.random.default_rng([seed, rank])
    dtype = dtype_of(name)
    if name == "bool":
        return np.asarray(rng.integers(0, 2, shape), dtype)
    if name in INTEGERS:  # all of them: what overflows wraps around, here as there
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True).reshape(
            shape
        )
    if op is ronde.Product:
        return np.asarray(rng.choice([-2.0, -1.0, 1.0, 2.0], shape), dtype)
    numbers = rng.integers(-8, 9, shape).astype(np.float64)
    if name in COMPLEX:
        return np.asarray(numbers + 1j * rng.integers(-8, 9, shape), dtype)
    if op in (ronde.Min, ronde.Max):
        numbers = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf], shape), numbers)
    return np.asarray(numbers, dtype)


def reduced(inputs: list[Array], op: Any) -> Array:
    """What the reduction of all ranks' arrays gives."""
    if op is ronde.Average and inputs[0].dtype.kind in "iu":
        return average_of_integers(inputs)
    total = functools.reduce(UFUNCS[op], inputs)
    if op is ronde.Average and total.dtype.kind == "c":  # NumPy's division of complex numbers is not exact
        total = quotient(total.real, len(inputs)) + 1j * quotient(total.imag, len(inputs))
    elif op is ronde.Average:
        total = quotient(total, len(inputs))
    return np.asarray(total, inputs[0].dtype)


def quotient(total: Array, n: int) -> Array:
    """Of floats, rounded once."""
    wide = np.float32 if total.dtype.itemsize == 2 else total.dtype
    return np.asarray(total.astype(wide) / np.asarray(n, wide), total.dtype)


def average_of_integers(inputs: list[Array]) -> Array:
    """The exact sum, divided, and cut off towards zero.

    Of 64-bit integers it takes more bits than NumPy has, so the sum is `high * 2**32 + low`, with `low` below 2**32.
    """
    dtype, n = inputs[0].dtype, len(inputs)
    wide = [x if dtype.itemsize == 8 else x.astype(np.int64) for x in inputs]
    low: Any = sum((x & 0xFFFFFFFF).astype(np.int64) for x in wide)
    high: Any = sum((x >> 32).astype(np.int64) for x in wide) + (low >> 32)
    low &= 0xFFFFFFFF
    quotient, rest = divmod(high, n)
    rounded_down, rest = divmod((rest << 32) + low, n)
    return np.asarray((quotient << 32) + rounded_down + ((high < 0) & (rest > 0)), np.int64).astype(dtype)
