"""The nearest center of each point, and the sums of the points of each center.

For an array this is one native pass over the points. For a CSR array the squared distances follow from its product with
the centers, so the work grows with the numbers that are not 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde._native import assign_to_centers
from ronde.ml.clustering.points import Points, is_sparse, make_csr, squared_lengths

__all__ = ["Nearest", "find_nearest", "sum_nearest"]

Array = NDArray[Any]

ROUNDING = 1e-14  # relative to the squared lengths of point and center: less is what rounding leaves of the distance 0


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
    lengths = (centers * centers).sum(axis=1)
    nearness = lengths - 2 * (
        points @ np.ascontiguousarray(centers.T)
    )  # without the squared length of the point
    labels = nearness.argmin(axis=1).astype(np.int32)
    point_lengths = squared_lengths(points)
    distances = np.take_along_axis(nearness, labels[:, None], axis=1)[:, 0] + point_lengths
    distances[distances <= ROUNDING * (point_lengths + lengths[labels])] = 0
    loss = distances if weights is None else distances * weights
    return Nearest(labels, distances, float(loss.sum()))
