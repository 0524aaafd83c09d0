"""Which rows of a data set each rank reads, and in which order.

1. In training all ranks read the same number of rows and take the same number of steps, so no rank waits at the end of
   an epoch. If the number of rows is not a multiple of the number of ranks, neighbouring ranks share a few rows.
2. In validation each row is read once, because a result that counts rows twice would depend on the number of ranks.
3. The order follows from the seed and the epoch alone, so a resumed run reads what the first one would have read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ronde.data.columns import Columns
from ronde.data.parquet_files import RowGroup, RowSpan

__all__ = ["batches", "disjoint_range", "equal_range", "shuffle_groups"]


def equal_range(rows: int, rank: int, size: int) -> range:
    """Return the rows of a rank: as many as every other rank has; all ranks together have every row."""
    length = -(-rows // size)
    first = rank * (rows - length) // (size - 1) if size > 1 else 0
    return range(first, first + length)


def disjoint_range(rows: int, rank: int, size: int) -> range:
    """Return the rows of a rank, where each row has one rank; their numbers differ by at most 1."""
    return range(rank * rows // size, (rank + 1) * rows // size)


def shuffle_groups(groups: Sequence[RowGroup], seed: int, epoch: int) -> list[RowGroup]:
    """Return the row groups in the order of an epoch."""
    shuffled = list(groups)
    random.Random(f"{seed} {epoch}").shuffle(shuffled)
    return shuffled


def batches(
    spans: Sequence[RowSpan],
    read: Callable[[RowSpan], Columns],
    batch_rows: int,
    buffer_rows: int = 0,
    order: np.random.Generator | None = None,
) -> Iterator[Columns]:
    """Yield all rows of the spans in batches of `batch_rows`, the last one perhaps with fewer.

    `order` shuffles the rows within a buffer of at least `buffer_rows` rows; None: they keep their order.
    """
    waiting: list[Columns] = []
    rows = 0
    for place, span in enumerate(spans):
        waiting.append(read(span))
        rows += span.end - span.first
        is_last = place == len(spans) - 1
        if rows < max(batch_rows, buffer_rows) and not is_last:
            continue
        buffer = {name: np.concatenate([each[name] for each in waiting]) for name in waiting[0]}
        if order is not None:
            permutation = order.permutation(rows)
            buffer = {name: array[permutation] for name, array in buffer.items()}
        end = rows if is_last else rows - rows % batch_rows
        for first in range(0, end, batch_rows):
            yield {name: array[first : min(first + batch_rows, end)] for name, array in buffer.items()}
        waiting = [{name: array[end:] for name, array in buffer.items()}]
        rows -= end
