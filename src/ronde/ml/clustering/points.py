"""Points: what k-means makes of rows by a metric; and the nearest center of each.

A point is a row of an array, or of a CSR array whose rows have few numbers other than 0. Centers are always arrays.

The Euclidean distance counts between points. With `cosine` and `haversine` the points lie on the unit sphere. There the
nearest center by the straight line is the nearest by angle, too. A mean is projected back onto the sphere, which gives
the point with the least sum of squared distances.

The search for the nearest centers of an array is one native pass over the points. For a CSR array the work grows with
the stored numbers: the product with the centers says which one is the nearest, and the squared distance to that one is
summed over the stored numbers. What it needs of all numbers of the centers is computed once, in `Centers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde._native import assign_to_centers
from ronde.ml.source_data import is_sparse

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = [
    "Centers",
    "GEOMETRIES",
    "Geometry",
    "Nearest",
    "PointReader",
    "Points",
    "as_centers",
    "column_moments",
    "distinct_points",
    "find_nearest",
    "join_points",
    "offset_of",
    "sum_nearest",
]

Array = NDArray[Any]
Points = Any  # an array or a CSR array

FAR = 8  # times the spread of a column
MOST_LATITUDE = np.pi / 2 + 1e-6  # radians; pi / 2 may be rounded up
# Relative to the squared length of the center: less than this is what rounding leaves of a distance of 0.
ORDER_ROUNDING = float(np.finfo(np.float64).eps)  # for each stored number: sums in another order differ
# Times the precision of the points, squared: the mean of equal points is not quite their equal.
MEAN_ROUNDING = 2.0


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


# Metrics


@dataclass(frozen=True)
class Geometry:
    """A metric.

    Attributes:
        points: Makes points of rows, of the same kind: an array, or a CSR array.
        rows: Makes rows of points: centers as the user sees them.
        loss_scale: What a squared distance of points counts in the loss.
        is_spherical: Whether points lie on the unit sphere.
    """

    points: Callable[[Points], Points]
    rows: Callable[[Array], Array]
    loss_scale: float
    is_spherical: bool

    def means(self, sums: Array, weights: Array, otherwise: Array) -> Array:
        """Return the centers of clusters. `otherwise`: those of clusters without weight, or without a mean."""
        if self.is_spherical:
            weights = np.linalg.norm(sums, axis=1)
        has_mean = weights > 0
        if has_mean.all():
            return np.asarray(sums / weights[:, None], otherwise.dtype)
        means = np.array(otherwise)
        means[has_mean] = sums[has_mean] / weights[has_mean, None]
        return means


def _unchanged(rows: Points) -> Points:
    return rows


def _directions(rows: Points) -> Points:
    """Return rows divided by their lengths. Raises ValueError for a row of zeros."""
    lengths = np.sqrt(squared_lengths(rows)) if is_sparse(rows) else np.linalg.norm(rows, axis=1)
    if not lengths.all():
        raise ValueError(
            f"row {int(np.argmin(lengths))} of these {len(lengths)} consists of zeros, and the cosine metric needs a "
            "direction: leave such rows out"
        )
    if is_sparse(rows):
        numbers = rows.data / np.repeat(lengths, np.diff(rows.indptr))
        return make_csr((numbers.astype(rows.dtype), rows.indices, rows.indptr), rows.shape)
    return np.asarray(rows / lengths[:, None], rows.dtype)


def _on_the_globe(rows: Array) -> Array:
    """Return points on the unit sphere for latitudes and longitudes in radians. Raises ValueError for other rows."""
    if rows.shape[1] != 2:
        raise ValueError(
            f"rows have {rows.shape[1]} columns, and the haversine metric needs 2: latitude and longitude in radians"
        )
    latitude, longitude = rows.T
    wrong = np.flatnonzero(np.abs(latitude) > MOST_LATITUDE)
    if len(wrong):
        raise ValueError(
            f"row {wrong[0]} of these {len(rows)} has the latitude {latitude[wrong[0]]:g}: expected radians from -pi/2 "
            "to pi/2 in the first column, so convert degrees by numpy.radians(), or exchange the columns"
        )
    points = [np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)]
    return np.stack(points, axis=1)


def _coordinates(points: Array) -> Array:
    x, y, z = points.T
    return np.stack([np.arctan2(z, np.hypot(x, y)), np.arctan2(y, x)], axis=1)


GEOMETRIES = {
    "euclidean": Geometry(_unchanged, _unchanged, 1.0, False),
    "cosine": Geometry(_directions, _unchanged, 0.5, True),
    "haversine": Geometry(_on_the_globe, _coordinates, 0.25, True),
}


@dataclass(frozen=True)
class PointReader:
    """Makes points of rows by a metric, in a dtype. `offset`: is subtracted from each row, an array; None: nothing.

    float32 has no digits left for rows that lie far from the origin, and close together: centers then end elsewhere
    than those of the same rows in float64. So a fit subtracts an offset from the columns of such rows.
    """

    metric: str
    dtype: np.dtype[Any]
    offset: Array | None = None

    @property
    def geometry(self) -> Geometry:
        """The metric."""
        return GEOMETRIES[self.metric]

    def points(self, rows: Any) -> Points:
        """Return the points of rows: a C-contiguous array, or a CSR array of those of a sparse matrix.

        Raises ValueError for rows that the metric does not take.
        """
        if is_sparse(rows):
            return self.geometry.points(make_csr(rows, dtype=self.dtype))
        points = self.geometry.points(np.asarray(rows, self.dtype))
        if self.offset is not None:
            points = points - self.offset
        return np.ascontiguousarray(points, self.dtype)

    def rows(self, points: Array) -> Array:
        """Return rows of points: centers as the user sees them."""
        rows = self.geometry.rows(points)
        return rows if self.offset is None else rows + self.offset

    def without_offset(self) -> PointReader:
        """Return what makes points of rows as they are."""
        return replace(self, offset=None)

    def of_block(self, block: Any) -> tuple[Points, Array | None]:
        """Return the points and weights of a block; None: its rows have no weights."""
        weights = getattr(block, "sample_weight", None)
        return self.points(block.X), None if weights is None else np.asarray(weights, np.float64)


def offset_of(sample: Array) -> Array | None:
    """Return the offset for float32 rows of which these are some; None if no column lies far from 0."""
    middle = np.median(sample, axis=0)
    is_far = np.abs(middle) > FAR * np.median(np.abs(sample - middle), axis=0)
    return np.where(is_far, middle, 0).astype(np.float32) if is_far.any() else None


# The nearest center


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
