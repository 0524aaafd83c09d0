"""The step of k-means with mini-batches (Sculley, "Web-scale k-means clustering", 2010).

Each center is the mean of all rows to which it has ever been the nearest. Which rows make a batch depends on the seed
and the number of the step only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.clustering.lloyd import (
    ChosenRows,
    all_rows,
    best_candidates,
    choose_rows,
    farthest_rows,
    random_keys,
    rows_by_number,
    squared_distance,
    tolerance_of,
)
from ronde.ml.clustering.points import Geometry, PointReader, Points, find_nearest, sum_nearest
from ronde.ml.history import Progress

__all__ = ["MiniBatchStep", "add_batch", "give_rows", "start_among", "weak_clusters"]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class MiniBatchStep:
    """Assigns the rows of a batch to their nearest centers, and moves these towards them.

    Attributes:
        reader: Makes points of rows.
        count: The number of centers.
        start: First centers, as points; or "k-means||", "k-means++" or "random".
        starts: How many first centers to draw.
        start_size: How many rows they are drawn among, and compared by.
        size: How many rows a batch has.
        tol: As of `LloydStep`.
        patience: After how many steps without a lower smoothed loss the fit ends; None: never.
        reassignment_ratio: Clusters with less than this times the weight of the largest get another center.
        seed: Of the draws.
        progress: As of `LloydStep`.
    """

    reader: PointReader
    count: int
    start: Sequence[Array] | str
    starts: int
    start_size: int
    size: int
    tol: float
    patience: int | None
    reassignment_ratio: float
    seed: int
    progress: Progress

    @staticmethod
    def first_state() -> dict[str, Any]:
        """Return the state with which the iteration begins."""
        return dict(
            seed=None,
            centers=None,
            counts=None,
            best=None,
            tolerance=None,
            smoothed=None,
            lowest=None,
            waited=0,
            records=[],
        )

    def __call__(self, c: IterationStep) -> None:
        geometry, state = self.reader.geometry, c.state
        if state.centers is None:
            state.tolerance = tolerance_of(c, self.reader, self.tol)
            state.seed = c.broadcast(self.seed)  # the ranks of a job may have drawn different ones
            state.centers, state.counts = self._start(c), np.zeros(self.count)
        rows = self._batch(c, self.size, c.step_no)
        remaining = iter(rows)
        total = c.sum_blocks(lambda block: _sums(next(remaining), state.centers))
        centers, counts = add_batch(geometry, state.centers, state.counts, total["sums"])
        weak = weak_clusters(counts, self.reassignment_ratio)
        if len(weak):
            give_rows(centers, counts, weak, farthest_rows(c, rows, centers, len(weak)))
        moved = squared_distance(centers, state.centers)
        state.centers, state.counts = centers, counts
        loss = float(total["loss"]) * geometry.loss_scale / max(float(total["sums"][:, -1].sum()), 1e-300)
        if np.isnan(loss):
            raise ValueError("X contains NaN or infinity: leave such rows out, or replace the values")
        record = dict(step=c.step_no, loss=loss, moved=moved)
        state.records.append(record)
        should_stop = c.task_id == 0 and self.progress(record, lambda: self._attributes(state))
        c.stop_if(should_stop or self._has_converged(c, loss, moved))

    def _start(self, c: IterationStep) -> Array:
        """Return the first centers with the least loss."""
        if not isinstance(self.start, str) and len(self.start) == 1:
            given: Array = c.broadcast(self.start[0])
            return given
        rows = self._start_rows(c)
        centers: Array = c.broadcast(self._best_start(rows, c.state.seed) if c.task_id == 0 else None)
        return centers

    def _start_rows(self, c: IterationStep) -> ChosenRows:
        """Return the rows among which first centers are drawn. Those without weight are none of them."""
        size = self.start_size
        rows = choose_rows(c, self._batch(c, size, 0), size, _keys_of_weighted)
        if len(rows.weights) >= min(self.count, c.num_rows):
            return rows
        drawn = random_keys([c.state.seed, 0])

        def keys(points: Points, weights: Array, block_no: int) -> Array:
            return drawn(points, (weights > 0).astype(np.float64), block_no)

        return choose_rows(c, all_rows(c, self.reader), size, keys)

    def _best_start(self, rows: ChosenRows, seed: int) -> Array:
        starts = self.start
        if isinstance(starts, str):
            starts = [
                start_among(rows, self.count, starts, [seed, number] if number else [seed])
                for number in range(self.starts)
            ]
        return min(starts, key=lambda centers: find_nearest(rows.points, centers, rows.weights).loss)

    def _batch(self, c: IterationStep, size: int, number: int) -> list[ChosenRows]:
        """Return the rows of a batch, by this task's blocks."""
        if size >= c.num_rows:
            numbers = np.arange(c.num_rows)
        else:
            random = np.random.default_rng([c.state.seed, number])
            numbers = np.sort(random.choice(c.num_rows, size, replace=False, shuffle=False))
        return list(rows_by_number(c, self.reader, numbers))

    def _has_converged(self, c: IterationStep, loss: float, moved: float) -> bool:
        """Judge as scikit-learn does. The first step counts only by how far it moved the centers."""
        state = c.state
        if self.tol > 0 and moved <= state.tolerance:
            return True
        if c.step_no == 1 or self.patience is None:
            return False
        share = min(1.0, 2 * self.size / (c.num_rows + 1))
        state.smoothed = loss if state.smoothed is None else (1 - share) * state.smoothed + share * loss
        if state.lowest is None or state.smoothed < state.lowest:
            state.lowest, state.waited = state.smoothed, 0
        else:
            state.waited += 1
        return bool(state.waited >= self.patience)

    def _attributes(self, state: SimpleNamespace) -> dict[str, Any]:
        return {"cluster_centers_": self.reader.rows(state.centers)}


def start_among(rows: ChosenRows, count: int, init: str, seed: list[int]) -> Array:
    """Return the first centers, of rows: drawn if `init` is "random", else by k-means++."""
    if init == "random":
        drawn = rows.with_keys(random_keys(seed)(rows.points, rows.weights, 0)).smallest(count)
        return np.resize(drawn.as_centers(), (count, rows.points.shape[1]))
    return best_candidates(rows.points, rows.weights, count, seed)


def add_batch(geometry: Geometry, centers: Array, counts: Array, sums: Array) -> tuple[Array, Array]:
    """Return the centers with the rows of a batch, and their weights.

    `counts`: the weights so far. `sums`: of `sum_nearest`, for the batch and these centers.
    """
    all_sums = centers * counts[:, None] + sums[:, :-1]
    counts = counts + sums[:, -1]
    return geometry.means(all_sums, counts, centers), counts


def weak_clusters(counts: Array, ratio: float) -> Array:
    """Return the numbers of the clusters without weight, or with less than `ratio` times that of the largest."""
    return np.flatnonzero((counts == 0) | (counts < ratio * counts.max()))


def give_rows(centers: Array, counts: Array, clusters: Array, rows: ChosenRows) -> None:
    """Move the centers of clusters to rows, in place; they get the least weight of the other clusters."""
    others = np.delete(counts, clusters)
    clusters = clusters[: len(rows.weights)]
    centers[clusters] = rows.as_centers()
    counts[clusters] = others.min() if len(others) else 0


def _keys_of_weighted(points: Points, weights: Array, block_no: int) -> Array:
    return np.where(weights > 0, 0.0, np.inf)


def _sums(rows: ChosenRows, centers: Array) -> dict[str, Any]:
    return sum_nearest(rows.points, centers, rows.weights)
