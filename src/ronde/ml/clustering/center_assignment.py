"""The nearest center of each point, and the sums of the points of each center: one native pass over the points."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde._native import assign_to_centers

__all__ = ["Nearest", "find_nearest", "sum_nearest"]

Array = NDArray[Any]


class Nearest(NamedTuple):
    """The nearest center of each point (int32) and the squared distance to it (float64); the weighted sum of these."""

    labels: NDArray[np.int32]
    squared_distances: NDArray[np.float64]
    loss: float


def find_nearest(points: Array, centers: Array, weights: Array | None = None) -> Nearest:
    """Return the nearest center of each point; of equally near ones the first.

    `points`, `centers`: C-contiguous, both float64 or both float32. `weights`: float64; None: 1 each.
    """
    labels, squared_distances = np.empty(len(points), np.int32), np.empty(len(points))
    loss = assign_to_centers(points, centers, weights, None, labels, squared_distances)
    return Nearest(labels, squared_distances, loss)


def sum_nearest(points: Array, centers: Array, weights: Array | None = None) -> dict[str, Any]:
    """Return "sums", a row for each center (the sum of its weighted points, and last that of the weights), and "loss".

    The arguments, and the loss, are those of `find_nearest`. Sums are float64.
    """
    sums = np.zeros((len(centers), points.shape[1] + 1))
    loss = assign_to_centers(points, centers, weights, sums, None, None)
    return {"sums": sums, "loss": loss}
