from __future__ import annotations

import numpy as np
import pytest

from ronde.data.rows import Buffers

FLOAT, LARGE = np.dtype(np.float64), 1 << 16


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.empty(LARGE, FLOAT)
    address, view = first.ctypes.data, first[5:].reshape(-1, 1)
    assert (first.dtype, first.shape) == (FLOAT, (LARGE,))
    del first
    second = buffers.empty(LARGE, FLOAT)
    assert not np.shares_memory(second, view)
    del view
    again = buffers.empty(2 * LARGE, np.dtype(np.int32))
    assert again.ctypes.data == address
    assert not np.shares_memory(again, second)


@pytest.mark.parametrize("size", [0, 1, LARGE // 8 - 1])
def test_small_arrays_are_not_kept(size: int) -> None:
    buffers = Buffers()
    assert buffers.empty(size, FLOAT).base is None


def test_memory_of_another_size_is_given_back() -> None:
    buffers = Buffers()
    buffers.empty(LARGE, FLOAT)
    buffers.empty(LARGE + 1, FLOAT)
    assert [kept.nbytes for kept in buffers._kept] == [8 * (LARGE + 1)]
