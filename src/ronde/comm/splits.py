"""How the rows of an array are split among ranks: by given numbers (alltoall) or evenly (reducescatter, scatter).
Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ronde.errors import UnsupportedError, UsageError

__all__ = ["check_has_rows", "even_share", "even_split", "row_counts"]


def check_has_rows(shape: Sequence[int], operation: str) -> None:
    """Raise UnsupportedError if an array of this shape has no first axis to split."""
    if not shape:
        raise UnsupportedError(f"{operation} splits the first axis; a 0-d array has none")


def even_share(rows: int, rank: int, size: int) -> int:
    """Return how many rows a rank gets of an even split: the first `rows % size` ranks get one more than the others."""
    return rows // size + (rank < rows % size)


def even_split(rows: int, size: int) -> list[int]:
    """Return how many rows each rank gets of an even split, as `numpy.array_split` does it."""
    return [even_share(rows, rank, size) for rank in range(size)]


def row_counts(splits: Sequence[int] | None, rows: int, size: int) -> tuple[int, ...]:
    """Return how many rows alltoall sends to each rank. `splits`: as the user gave them. Raises UsageError."""
    if splits is None:
        if rows % size:
            raise UsageError(
                f"alltoall without splits needs a first dimension divisible by {size}, not {rows}"
            )
        return (rows // size,) * size
    try:
        counts = tuple(operator.index(split) for split in splits)
    except TypeError as error:
        raise UsageError(f"splits needs {size} whole numbers, one for each rank: {error}") from None
    if len(counts) != size or any(count < 0 for count in counts) or sum(counts) != rows:
        raise UsageError(
            f"splits needs {size} numbers >= 0 that add up to {rows} (the first dimension), not {list(counts)}"
        )
    return counts
