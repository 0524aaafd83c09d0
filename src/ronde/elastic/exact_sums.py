"""Sums of floating-point arrays over all ranks that do not depend on which rank has which summand.

Each summand becomes an integer with a common power of two, and sums of integers are exact in any order:

  1. The ranks agree, for each array, on the largest absolute value of all summands, and so on the power of two.
  2. Each summand is rounded to a multiple of that power. Its 64 bits leave room for the sum of all summands.
  3. The sum of the integers over all ranks is converted back, with one rounding.

So equal summands give equal bits, however many ranks there are. A summand is rounded to a multiple of the largest one
times 2^-61 times their number: float32 loses nothing in summands down to 2^-30 of the largest one, float64 in the
largest ones. If a summand is not finite, the sum is NaN everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comm.communicator import Communicator
from ronde.types import Max, Sum

__all__ = ["exact_sum"]

_BITS = 62
Array = NDArray[Any]


def exact_sum(
    world: Communicator, summands: Sequence[Sequence[Array]], like: Sequence[Array], total: int
) -> list[Array]:
    """Return the sums of each array over all summands of all ranks. All ranks call it.

    `summands`: those of this rank, each a list of floating-point arrays; a rank may have none. `like`: arrays of the
    same shapes and dtypes, which give those of the result. `total`: the number of summands of all ranks, at least 1.
    """
    largest = np.zeros(len(like), np.float64)
    for arrays in summands:
        for number, array in enumerate(arrays):
            if array.size:
                # NaN wins, because np.maximum propagates it; Max over ranks need not, so it travels as infinity.
                largest[number] = np.maximum(largest[number], np.max(np.abs(array)).astype(np.float64))
    largest[~np.isfinite(largest)] = np.inf
    largest = world.allreduce(largest, op=Max)
    shifts = [_shift(value, total) for value in largest]
    sizes = [array.size for array in like]
    mine = np.zeros(sum(sizes), np.int64)
    for arrays in summands:
        begin = 0
        for array, size, shift in zip(arrays, sizes, shifts):
            mine[begin : begin + size] += _as_integers(array, shift)
            begin += size
    sums = world.allreduce(mine, op=Sum)
    results, begin = [], 0
    for array, size, shift, most in zip(like, sizes, shifts, largest):
        part = _as_floats(sums[begin : begin + size], shift)
        if not np.isfinite(most):
            part = np.full(size, np.nan)
        results.append(part.astype(array.dtype).reshape(array.shape))
        begin += size
    return results


def _shift(largest: float, total: int) -> int:
    """Return the power of two by which summands are multiplied before they are rounded."""
    if largest == 0 or not np.isfinite(largest):
        return 0
    exponent = int(np.frexp(largest)[1])  # largest < 2**exponent
    return _BITS - (total - 1).bit_length() - exponent


def _as_integers(array: Array, shift: int) -> NDArray[np.int64]:
    values = array.astype(np.float64).reshape(-1)
    values[~np.isfinite(values)] = 0
    return np.rint(np.ldexp(values, shift)).astype(np.int64)


def _as_floats(integers: NDArray[np.int64], shift: int) -> NDArray[np.float64]:
    return np.ldexp(integers.astype(np.float64), -shift)
