"""The first centers of k-means.

`k-means||` (Bahmani et al., "Scalable k-means++", 2012) draws, in a few passes over the rows, candidates that are far
from those before them, and weights each by the rows nearest to it; k-means++ chooses the centers among the candidates.
If there are few rows, all of them are candidates. `k-means++` (Arthur and Vassilvitskii, 2007) draws one center after
the other in this way, with a pass over the rows for each. Each row block has its random generator, so the draws do not
depend on the number of tasks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.clustering.block_points import PointReader
from ronde.ml.clustering.center_assignment import find_nearest, sum_nearest
from ronde.ml.clustering.chosen_rows import ChosenRows, Keys, all_rows, choose_rows, random_keys
from ronde.ml.clustering.points import Points, as_centers, distinct_points

__all__ = ["best_candidates", "draw_centers"]

Array = NDArray[Any]

FEW_ROWS = 8192  # all of which are candidates
PASSES = 2  # over more rows; with more passes the final loss was hardly lower
CANDIDATES_FOR_A_CENTER = 2  # in each pass


def draw_centers(c: IterationStep, reader: PointReader, count: int, init: str, seed: list[int]) -> Array:
    """Return the first centers, as points. All tasks call it, with the same arguments.

    `init`: "k-means||", "k-means++" or "random". If there are fewer distinct points than centers, some are equal.
    """
    if init == "random":
        drawn = choose_rows(c, all_rows(c, reader), count, random_keys(seed))
        return np.resize(drawn.as_centers(), (count, drawn.points.shape[1]))
    if init == "k-means++" and c.num_rows > FEW_ROWS:
        return _drawn_one_by_one(c, reader, count, seed)
    points, weights = _candidates(c, reader, count, seed)
    # Task 0 chooses, because the last bits of products may differ between machines.
    chosen = best_candidates(points, weights, count, seed) if c.task_id == 0 else None
    centers: Array = c.broadcast(chosen)
    return centers


def best_candidates(points: Points, weights: Array, count: int, seed: list[int]) -> Array:
    """Return centers among candidates, by k-means++. Equal candidates count as one, and their order has no effect."""
    distinct, places = distinct_points(points)
    weights = np.bincount(places, weights)
    distinct, weights = distinct[weights > 0], weights[weights > 0]
    if len(weights) <= count:
        return np.resize(as_centers(distinct), (count, points.shape[1]))
    # Here, because only one task needs it, and it takes long to import.
    from sklearn.cluster import kmeans_plusplus

    state = np.random.RandomState(np.random.default_rng(seed).integers(1 << 31))
    centers: Array = kmeans_plusplus(distinct, count, sample_weight=weights, random_state=state)[0]
    return np.ascontiguousarray(centers)


def _candidates(c: IterationStep, reader: PointReader, count: int, seed: list[int]) -> tuple[Points, Array]:
    """Return the candidates and their weights."""
    if c.num_rows <= FEW_ROWS:
        rows = choose_rows(
            c, all_rows(c, reader), FEW_ROWS, lambda points, weights, block_no: np.zeros(len(weights))
        )
        return rows.points, rows.weights
    candidates = choose_rows(c, all_rows(c, reader), 1, random_keys([*seed, 0])).as_centers()
    for number in range(1, PASSES + 1):
        drawn = _draw_far_rows(c, reader, CANDIDATES_FOR_A_CENTER * count, candidates, [*seed, number])
        candidates = np.concatenate([candidates, drawn.as_centers()])

    def weigh(block: Any) -> Array:
        points, weights = reader.of_block(block)
        sums: Array = sum_nearest(points, candidates, weights)["sums"]
        return sums[:, -1]

    return candidates, c.sum_blocks(weigh)


def _draw_far_rows(
    c: IterationStep, reader: PointReader, count: int, candidates: Array, seed: list[int]
) -> ChosenRows:
    """Draw rows with probabilities in proportion to weight x squared distance to the nearest candidate."""
    by_weight: Keys = random_keys(seed)

    def keys(points: Points, weights: Array, block_no: int) -> Array:
        distances = find_nearest(points, candidates).squared_distances
        return by_weight(points, weights * distances, block_no)

    return choose_rows(c, all_rows(c, reader), count, keys)


def _drawn_one_by_one(c: IterationStep, reader: PointReader, count: int, seed: list[int]) -> Array:
    """Draw each center with probabilities in proportion to weight x squared distance to the nearest one before it."""
    centers = choose_rows(c, all_rows(c, reader), 1, random_keys([*seed, 0])).as_centers()
    nearest: dict[int, Array] = {}  # by block: the squared distances to the nearest center

    def keys(points: Points, weights: Array, block_no: int) -> Array:
        distances = find_nearest(points, centers[-1:]).squared_distances
        nearest[block_no] = np.minimum(distances, nearest.get(block_no, distances))
        return random_keys([*seed, len(centers)])(points, weights * nearest[block_no], block_no)

    while len(centers) < count:
        drawn = choose_rows(c, all_rows(c, reader), 1, keys).as_centers()
        if not len(drawn):  # each row is a center
            return np.resize(centers, (count, centers.shape[1]))
        centers = np.concatenate([centers, drawn])
    return centers
