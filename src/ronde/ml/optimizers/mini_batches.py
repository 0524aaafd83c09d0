"""Which rows of each block are in each batch of a pass over the data: the same for any number of tasks.

The rows of a block are shuffled for each pass, and dealt out to the batches in turn. Each batch gets an even share of
each block; the rows of a block with fewer of them than there are batches are in random ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MiniBatches"]


class MiniBatches:
    """The batches of one pass.

    Args:
        seed: Of the random numbers.
        pass_no: The number of the pass.
        num_batches: How many batches there are.
    """

    def __init__(self, seed: int, pass_no: int, num_batches: int) -> None:
        self._seed, self._pass_no, self._num_batches = seed, pass_no, num_batches
        self._shuffled: dict[int, tuple[int, NDArray[Any]]] = {}

    def rows(self, batch: int, block: int, num_rows: int) -> NDArray[Any]:
        """Return the indices of the rows of a block that are in a batch. `num_rows`: of the block."""
        if block not in self._shuffled:
            random = np.random.default_rng([self._seed, self._pass_no, block])
            self._shuffled[block] = int(random.integers(self._num_batches)), random.permutation(num_rows)
        offset, shuffled = self._shuffled[block]
        begin, end = ((num_rows * number + offset) // self._num_batches for number in (batch, batch + 1))
        return shuffled[begin:end]
