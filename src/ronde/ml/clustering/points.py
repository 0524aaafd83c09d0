"""Points, a row for each: an array, or a CSR array whose rows have few numbers other than 0.

Here is what the two need differently. Centers are always arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.sparse_rows import is_sparse

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = [
    "Points",
    "as_centers",
    "column_moments",
    "distinct_points",
    "join_points",
    "make_csr",
    "row_numbers",
    "squared_lengths",
    "sums_at",
]

Array = NDArray[Any]
Points = Any  # an array or a CSR array


def make_csr(*arguments: Any, **named: Any) -> csr_array:
    """Return `scipy.sparse.csr_array` of these arguments."""
    from scipy.sparse import csr_array  # here, because tasks with arrays do not need it

    return csr_array(*arguments, **named)


def as_centers(points: Points) -> Array:
    """Return points as an array."""
    return points.toarray() if is_sparse(points) else points  # type: ignore[no-any-return]


def join_points(parts: Sequence[Points]) -> Points:
    """Return the points of all parts, which are of one kind."""
    if not is_sparse(parts[0]):
        return np.concatenate(parts)
    from scipy.sparse import vstack  # as in `make_csr`

    return vstack(parts, "csr")


def squared_lengths(points: csr_array) -> Array:
    """Return the squared length of each point, in float64."""
    squares = np.square(points.data, dtype=np.float64)
    return sums_at(row_numbers(points), squares, points.shape[0])


def column_moments(points: Points, weights: Array | None, shift: Array) -> dict[str, Any]:
    """Return the weighted sums of the coordinates and of their squares, and the sum of the weights.

    `shift`: is subtracted from each point of an array, against rounding; CSR arrays stay sparse.
    """
    if is_sparse(points):
        weights = np.ones(points.shape[0]) if weights is None else weights
        by_number = weights[row_numbers(points)]
        columns, count = points.indices, points.shape[1]
        squares = np.square(points.data, dtype=np.float64)
        return {
            "sum": sums_at(columns, by_number * points.data, count),
            "squares": sums_at(columns, by_number * squares, count),
            "weight": float(weights.sum()),
        }
    offsets = points.astype(np.float64) - shift
    weighted = offsets if weights is None else offsets * weights[:, None]
    weight = len(points) if weights is None else float(weights.sum())
    return {"sum": weighted.sum(axis=0), "squares": (weighted * offsets).sum(axis=0), "weight": float(weight)}


def distinct_points(points: Points) -> tuple[Points, Array]:
    """Return the points without repetition, in an order that does not depend on theirs, and the place of each there."""
    if not is_sparse(points):
        distinct, places = np.unique(points, axis=0, return_inverse=True)
        return distinct, places.reshape(-1)
    points = points.copy()
    points.sum_duplicates()
    points.eliminate_zeros()
    columns, numbers = points.indices.astype(">i8"), _sortable(points.data)
    rows = np.empty(points.shape[0], object)
    for number in range(len(rows)):
        part = slice(*points.indptr[number : number + 2])
        rows[number] = columns[part].tobytes() + numbers[part].tobytes()
    _, first, places = np.unique(rows, return_index=True, return_inverse=True)
    return points[first], places.reshape(-1)


def _sortable(numbers: Array) -> Array:
    """Return integers whose bytes have the order of the numbers: the same for float32 as for float64."""
    bits = (numbers.astype(np.float64) + 0.0).view(np.int64)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 63) | np.int64(-(1 << 63)))).astype(">i8")


def row_numbers(points: csr_array) -> Array:
    """Return the row of each stored number."""
    return np.repeat(np.arange(points.shape[0]), np.diff(points.indptr))


def sums_at(places: Array, numbers: Array, count: int) -> Array:
    """Return the sums of the numbers at each of `count` places, as float64 also if there are no numbers."""
    return np.bincount(places, numbers, minlength=count).astype(np.float64, copy=False)
