"""The nearest center of each point, and the sums of the points of each center.

For an array this is one native pass over the points. For a CSR array the work grows with the stored numbers: the
product with the centers says which one is the nearest, and the squared distance to that one is summed over the stored
numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde._native import assign_to_centers
from ronde.ml.clustering.points import Points, make_csr, row_numbers, sums_at
from ronde.ml.sparse_rows import is_sparse

__all__ = ["Nearest", "find_nearest", "sum_nearest"]

Array = NDArray[Any]

# Relative to the squared length of the center: less than this is what rounding leaves of a distance of 0.
ORDER_ROUNDING = float(np.finfo(np.float64).eps)  # for each stored number: sums in another order differ
MEAN_ROUNDING = (
    2.0  # times the precision of the points, squared: the mean of equal points is not quite their equal
)


class Nearest(NamedTuple):
    """The nearest center of each point (int32) and the squared distance to it (float64); the weighted sum of these."""

    labels: NDArray[np.int32]
    squared_distances: NDArray[np.float64]
    loss: float


def find_nearest(points: Points, centers: Array, weights: Array | None = None) -> Nearest:
    """Return the nearest center of each point; of equally near ones the first.

    `points`: a C-contiguous array, or a CSR array; `centers`: a C-contiguous array; both float64 or both float32.
    `weights`: float64; None: 1 each.
    """
    if is_sparse(points):
        return _find_nearest_sparse(points, centers, weights)
    labels, squared_distances = np.empty(len(points), np.int32), np.empty(len(points))
    loss = assign_to_centers(points, centers, weights, None, labels, squared_distances)
    return Nearest(labels, squared_distances, loss)


def sum_nearest(points: Points, centers: Array, weights: Array | None = None) -> dict[str, Any]:
    """Return "sums", a row for each center (the sum of its weighted points, and last that of the weights), and "loss".

    The arguments, and the loss, are those of `find_nearest`. Sums are float64.
    """
    sums = np.zeros((len(centers), points.shape[1] + 1))
    if is_sparse(points):
        labels, _, loss = _find_nearest_sparse(points, centers, weights)
        weights = np.ones(len(labels)) if weights is None else weights
        members = make_csr((weights, labels, np.arange(len(labels) + 1)), (len(labels), len(centers))).T
        sums[:, :-1] = (members @ points).toarray()
        sums[:, -1] = np.bincount(labels, weights, minlength=len(centers))
        return {"sums": sums, "loss": loss}
    loss = assign_to_centers(points, centers, weights, sums, None, None)
    return {"sums": sums, "loss": loss}


def _find_nearest_sparse(points: Points, centers: Array, weights: Array | None) -> Nearest:
    centers = centers.astype(np.float64)
    squares = centers * centers
    # Without the squared length of the point.
    nearness = squares.sum(axis=1) - 2 * (points @ np.ascontiguousarray(centers.T))
    labels = nearness.argmin(axis=1).astype(np.int32)
    distances = _distances_to(points, centers, squares, labels)
    loss = distances if weights is None else distances * weights
    return Nearest(labels, distances, float(loss.sum()))


def _distances_to(points: Points, centers: Array, squares: Array, labels: Array) -> Array:
    """Return the squared distance of each point to its center. `squares`: of the numbers of the centers.

    A difference of squared lengths would lose the digits of points that are near each other and far from the origin. So
    only the columns in which a point has no stored number count by such a difference.
    """
    rows, (count, columns) = row_numbers(points), points.shape
    places = labels[rows] * np.intp(columns) + points.indices
    offsets = points.data - centers.ravel()[places]
    distances = sums_at(rows, offsets * offsets, count)
    # Sums in the order of the columns, as those of the stored numbers: equal ones have a difference of exactly 0.
    lengths = np.cumsum(squares, axis=1)[labels, -1]
    others = lengths - sums_at(rows, squares.ravel()[places], count)
    others[others <= ORDER_ROUNDING * np.diff(points.indptr) * lengths] = 0
    distances += others
    distances[distances <= (MEAN_ROUNDING * np.finfo(points.dtype).eps) ** 2 * lengths] = 0
    return distances
