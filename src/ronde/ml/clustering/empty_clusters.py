"""Clusters that have lost all their rows get the rows that are farthest from their centers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.clustering.center_assignment import find_nearest
from ronde.ml.clustering.chosen_rows import ChosenRows, choose_rows
from ronde.ml.clustering.points import Points

__all__ = ["far_keys", "farthest_rows", "move_rows"]

Array = NDArray[Any]

NO_WEIGHT = 1e-9  # of a cluster, relative to that of a row


def farthest_rows(c: IterationStep, blocks: Iterable[ChosenRows], centers: Array, count: int) -> ChosenRows:
    """Return up to `count` rows that are farthest from their centers; none that is a center or has no weight.

    All tasks call it. `blocks`: as of `choose_rows`.
    """
    return choose_rows(c, blocks, count, lambda points, weights, block_no: far_keys(points, weights, centers))


def far_keys(points: Points, weights: Array, centers: Array) -> Array:
    """Return keys that are the smaller, the farther a point is from its center; infinite for rows not to choose."""
    distances = find_nearest(points, centers).squared_distances
    return np.where((weights > 0) & (distances > 0), -distances, np.inf)


def move_rows(sums: Array, centers: Array, clusters: Array, rows: ChosenRows) -> None:
    """Make each of the clusters consist of one of the rows, which leaves its cluster; in place.

    `sums`: of `sum_nearest`, for these centers. `clusters`: at least as many as rows.
    """
    losing = find_nearest(rows.points, centers).labels
    moved = np.column_stack([rows.as_centers(), np.ones(len(rows.weights))]) * rows.weights[:, None]
    for cluster, loser, row in zip(clusters, losing, moved):
        left = sums[loser] - row
        sums[loser] = left if left[-1] > NO_WEIGHT * row[-1] else 0  # not what rounding leaves
        sums[cluster] = row
