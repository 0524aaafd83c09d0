"""The nearest center of each point, and the sums of the points of each center.

For an array this is one native pass over the points. For a CSR array the work grows with the stored numbers: the
product with the centers says which one is the nearest, and the squared distance to that one is summed over the stored
numbers. What it needs of all numbers of the centers is computed once, in `Centers`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde._native import assign_to_centers
from ronde.ml.clustering.points import Points, make_csr, sums_at
from ronde.ml.sparse_rows import is_sparse

__all__ = ["Centers", "Nearest", "find_nearest", "sum_nearest"]

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


class Centers:
    """Centers, and what a search for sparse points needs of them: for many searches among the same centers.

    Args:
        array: A C-contiguous array.
    """

    def __init__(self, array: Array) -> None:
        self.array = array

    @cached_property
    def numbers(self) -> Array:
        """The centers in float64, with a 0 after each, as a flat array: the places are those of the sums."""
        padded = np.zeros((len(self.array), self.array.shape[1] + 1))
        padded[:, :-1] = self.array
        return padded.ravel()

    @cached_property
    def columns(self) -> Array:
        """The numbers by column, in float64."""
        return np.ascontiguousarray(self.array.T, np.float64)

    @cached_property
    def ones(self) -> Array:
        """A 1 for each column."""
        return np.ones(self.array.shape[1])

    @cached_property
    def lengths(self) -> Array:
        """The squared length of each center, summed in the order of the columns."""
        return np.array([np.cumsum(np.square(each, dtype=np.float64))[-1] for each in self.array])


def find_nearest(points: Points, centers: Array | Centers, weights: Array | None = None) -> Nearest:
    """Return the nearest center of each point; of equally near ones the first.

    `points`: a C-contiguous array, or a CSR array; `centers`: a C-contiguous array; both float64 or both float32.
    `weights`: float64; None: 1 each.
    """
    if is_sparse(points):
        return _find_nearest_sparse(points, _prepared(centers), weights)[0]
    centers = _array_of(centers)
    labels, squared_distances = np.empty(len(points), np.int32), np.empty(len(points))
    loss = assign_to_centers(points, centers, weights, None, labels, squared_distances)
    return Nearest(labels, squared_distances, loss)


def sum_nearest(points: Points, centers: Array | Centers, weights: Array | None = None) -> dict[str, Any]:
    """Return "sums", a row for each center (the sum of its weighted points, and last that of the weights), and "loss".

    The arguments, and the loss, are those of `find_nearest`. Sums are float64.
    """
    if is_sparse(points):
        nearest, places = _find_nearest_sparse(points, _prepared(centers), weights)
        sums = _sums_of_members(points, nearest.labels, places, weights, len(_array_of(centers)))
        return {"sums": sums, "loss": nearest.loss}
    array = _array_of(centers)
    sums = np.zeros((len(array), points.shape[1] + 1))
    loss = assign_to_centers(points, array, weights, sums, None, None)
    return {"sums": sums, "loss": loss}


def _prepared(centers: Array | Centers) -> Centers:
    return centers if isinstance(centers, Centers) else Centers(centers)


def _array_of(centers: Array | Centers) -> Array:
    return centers.array if isinstance(centers, Centers) else centers


def _sums_of_members(
    points: Points, labels: Array, places: Array, weights: Array | None, count: int
) -> Array:
    """Return the sums of the weighted points of each cluster, in their order, and last of their weights.

    `places`: of the stored numbers in the sums.
    """
    columns = points.shape[1] + 1
    numbers = points.data if weights is None else points.data * np.repeat(weights, np.diff(points.indptr))
    sums = sums_at(places, numbers, count * columns).reshape(count, columns)
    sums[:, -1] = np.bincount(labels, weights, minlength=count)
    return sums


def _find_nearest_sparse(points: Points, centers: Centers, weights: Array | None) -> tuple[Nearest, Array]:
    """Return the nearest centers, and the place of each stored number in `Centers.numbers` of the nearest one."""
    # Without the squared length of the point.
    nearness = centers.lengths - 2 * (points @ centers.columns)
    labels = nearness.argmin(axis=1)
    places = np.repeat(labels * (points.shape[1] + 1), np.diff(points.indptr)) + points.indices
    distances = _distances_to(points, centers, labels, places)
    loss = distances if weights is None else distances * weights
    return Nearest(labels.astype(np.int32), distances, float(loss.sum())), places


def _distances_to(points: Points, centers: Centers, labels: Array, places: Array) -> Array:
    """Return the squared distance of each point to its center.

    A difference of squared lengths would lose the digits of points that are near each other and far from the origin. So
    only the columns in which a point has no stored number count by such a difference.
    """
    numbers = centers.numbers[places]
    offsets = points.data - numbers
    distances = _row_sums(points, offsets * offsets, centers.ones)
    # Sums in the order of the columns, as those of the stored numbers: equal ones have a difference of exactly 0.
    lengths = centers.lengths[labels]
    others = lengths - _row_sums(points, numbers * numbers, centers.ones)
    others[others <= ORDER_ROUNDING * np.diff(points.indptr) * lengths] = 0
    distances += others
    distances[distances <= (MEAN_ROUNDING * np.finfo(points.dtype).eps) ** 2 * lengths] = 0
    return distances


def _row_sums(points: Points, numbers: Array, ones: Array) -> Array:
    """Return the sum over the stored numbers of each point, in order, of other numbers at their places."""
    sums: Array = make_csr((numbers, points.indices, points.indptr), points.shape) @ ones
    return sums
