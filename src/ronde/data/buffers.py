"""Memory for the results of each step, reused as soon as nothing refers to it.

The kernel allocates new memory page by page, which takes longer than adding the numbers on these pages.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffers"]


LARGE = 1 << 16  # bytes; smaller arrays are not kept


def _references(buffers: list[NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(buffer) for buffer in buffers]


# The references to a buffer that only a list has. It is counted here because it depends on the version of Python.
UNUSED = _references([np.empty(0, np.uint8)])[0]


class Buffers:
    """Makes arrays for one task. An array's memory is reused when no view of the array is left."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []

    def empty(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array of one axis."""
        num_bytes = size * dtype.itemsize
        if num_bytes < LARGE:
            return np.empty(size, dtype)
        unused = [buffer for buffer, count in zip(self._kept, _references(self._kept)) if count == UNUSED]
        for buffer in unused:
            if buffer.nbytes == num_bytes:
                return buffer.view(dtype)
        ids = set(map(id, unused))  # all of other sizes
        self._kept = [buffer for buffer in self._kept if id(buffer) not in ids]
        self._kept.append(np.empty(num_bytes, np.uint8))
        return self._kept[-1].view(dtype)
