"""The step of k-means (Lloyd's algorithm), for one or several runs from different starts.

First centers: `k-means||` (Bahmani et al., "Scalable k-means++", 2012) draws, in a few passes over the rows, candidates
that are far from those before them, and weights each by the rows nearest to it; k-means++ chooses the centers among the
candidates. If there are few rows, all of them are candidates. `k-means++` (Arthur and Vassilvitskii, 2007) draws one
center after the other in this way, with a pass over the rows for each.

Rows are chosen by keys: those with the smallest ones, of all tasks. A key is computed from the point and the number of
its row block, which has its own random generator, so the choice does not depend on the tasks. Clusters that have lost
all their rows get the rows that are farthest from their centers in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.clustering.points import (
    Centers,
    PointReader,
    Points,
    as_centers,
    column_moments,
    distinct_points,
    find_nearest,
    join_points,
    sum_nearest,
)
from ronde.ml.history import Progress

__all__ = [
    "AssignRows",
    "ChosenRows",
    "LloydStep",
    "RowAssignment",
    "all_rows",
    "best_candidates",
    "choose_rows",
    "far_keys",
    "farthest_rows",
    "final_centers",
    "move_rows",
    "random_keys",
    "rows_by_number",
    "squared_distance",
    "tolerance_of",
]

Array = NDArray[Any]

NO_WEIGHT = 1e-9  # of a cluster, relative to that of a row
FEW_ROWS = 8192  # all of which are candidates
PASSES = 2  # over more rows; with more passes the final loss was hardly lower
CANDIDATES_FOR_A_CENTER = 2  # in each pass
Keys = Callable[[Points, Array, int], Array]  # of points, by their weights and the number of their block


@dataclass(frozen=True, eq=False)
class LloydStep:
    """Assigns all rows to their nearest centers, and moves the centers to the means of their rows.

    Attributes:
        reader: Makes points of rows.
        count: The number of centers.
        start: The first centers of each run, as points; or "k-means||", "k-means++" or "random".
        runs: How many runs.
        max_iter: How many steps a run has at most.
        tol: The squared distance, relative to the variance of the points, by which all centers together may still move
            in the last step.
        seed: Of the draws.
        progress: Gets the record of each step, on task 0.
    """

    reader: PointReader
    count: int
    start: Sequence[Array] | str
    runs: int
    max_iter: int
    tol: float
    seed: int
    progress: Progress

    @staticmethod
    def first_state() -> dict[str, Any]:
        """Return the state with which the iteration begins.

        `best_loss` is None with a single run, whose loss nothing depends on; `AssignRows` returns it.
        """
        return dict(
            run=0,
            steps=0,
            seed=None,
            tolerance=None,
            centers=None,
            best=None,
            best_loss=None,
            best_steps=0,
            records=[],
        )

    def __call__(self, c: IterationStep) -> None:
        state = c.state
        if state.tolerance is None:
            state.tolerance = tolerance_of(c, self.reader, self.tol)
            state.seed = c.broadcast(self.seed)  # the ranks of a job may have drawn different ones
        if state.centers is None:
            state.centers, state.steps = self._start(c), 0
        centers, loss = self._moved(c)
        moved = squared_distance(centers, state.centers)
        state.centers = centers
        state.steps += 1
        record = dict(step=c.step_no, loss=loss, moved=moved, run=state.run + 1)
        state.records.append(record)
        ends = moved <= state.tolerance or state.steps == self.max_iter
        if ends:
            self._end_run(c)
        should_stop = c.task_id == 0 and self.progress(record, lambda: self._attributes(state))
        c.stop_if(should_stop or (ends and state.run == self.runs))

    def _start(self, c: IterationStep) -> Array:
        if isinstance(self.start, str):
            return draw_centers(c, self.reader, self.count, self.start, [c.state.seed, c.state.run])
        # A function may have drawn other ones on other ranks.
        centers: Array = c.broadcast(self.start[c.state.run])
        return centers

    def _moved(self, c: IterationStep) -> tuple[Array, float]:
        """Return the new centers, and the loss with the old ones."""
        reader, centers = self.reader, c.state.centers
        prepared = Centers(centers)

        def sums_of(block: Any) -> dict[str, Any]:
            points, weights = reader.of_block(block)
            return sum_nearest(points, prepared, weights)

        total = c.sum_blocks(sums_of)
        sums, loss = total["sums"], float(total["loss"]) * reader.geometry.loss_scale
        if np.isnan(loss):
            raise ValueError("X contains NaN or infinity: leave such rows out, or replace the values")
        empty = np.flatnonzero(sums[:, -1] == 0)
        if len(empty):
            move_rows(sums, centers, empty, farthest_rows(c, all_rows(c, reader), centers, len(empty)))
        return reader.geometry.means(sums[:, :-1], sums[:, -1], centers), loss

    def _end_run(self, c: IterationStep) -> None:
        """Keep the centers of this run if they are the best so far, and let the next step start another run."""
        state = c.state
        loss = None
        if self.runs > 1:
            prepared = Centers(state.centers)
            loss = c.sum_blocks(lambda block: _loss(self.reader, prepared, block))
        if state.best is None or loss < state.best_loss:
            state.best, state.best_loss, state.best_steps = state.centers, loss, state.steps
        state.run += 1
        state.centers = None

    def _attributes(self, state: SimpleNamespace) -> dict[str, Any]:
        """Return what the estimator would have as attributes if the fit ended with this state."""
        return {"cluster_centers_": self.reader.rows(final_centers(state))}


def squared_distance(centers: Array, others: Array) -> float:
    """Return the squared distance between corresponding centers, all together."""
    moves = np.subtract(centers, others, dtype=np.float64)
    return float(np.multiply(moves, moves, out=moves).sum())


def tolerance_of(c: IterationStep, reader: PointReader, tol: float) -> float:
    """Return `tol` times the mean variance of the points' coordinates. All tasks call it."""
    if tol == 0:
        return 0.0
    first = as_centers(reader.points(next(iter(c.blocks)).X[:1])) if c.task_id == 0 else None
    shift = c.broadcast(first)

    def moments(block: Any) -> dict[str, Any]:
        points, weights = reader.of_block(block)
        return column_moments(points, weights, shift)

    total = c.sum_blocks(moments)
    means = total["sum"] / total["weight"]
    return float(tol * (total["squares"] / total["weight"] - means**2).mean())


@dataclass(frozen=True)
class RowAssignment:
    """The centers of the rows after a fit. `labels`: of a task's rows; None unless they are kept; the others of all
    rows: `loss`, and `num_found`, the number of centers with rows.
    """

    labels: Array | None
    loss: float
    num_found: int


class AssignRows:
    """The `finish` of `iterate`: assigns the rows to the last centers. `keeps_labels`: whether these travel back."""

    def __init__(self, reader: PointReader, keeps_labels: bool = True) -> None:
        self._reader, self._keeps_labels = reader, keeps_labels

    def __call__(self, c: IterationStep) -> RowAssignment:
        centers, reader = final_centers(c.state), self._reader
        if reader.offset is not None:  # as predictions, which have none
            centers, reader = reader.rows(centers), reader.without_offset()
        labels, prepared = [np.empty(0, np.int32)], Centers(centers)

        def assign(block: Any) -> dict[str, Any]:
            points, weights = reader.of_block(block)
            nearest = find_nearest(points, prepared, weights)
            if self._keeps_labels:
                labels.append(nearest.labels)
            return {"loss": nearest.loss, "counts": np.bincount(nearest.labels, minlength=len(centers))}

        total = c.sum_blocks(assign)
        loss = float(total["loss"]) * reader.geometry.loss_scale
        kept = np.concatenate(labels) if self._keeps_labels else None
        return RowAssignment(kept, loss, int(np.count_nonzero(total["counts"])))


def final_centers(state: SimpleNamespace) -> Array:
    """Return the centers with which the fit ends, also if a callback has ended it in its first run."""
    centers: Array = state.centers if state.best is None else state.best
    return centers


def _loss(reader: PointReader, centers: Centers, block: Any) -> float:
    points, weights = reader.of_block(block)
    return find_nearest(points, centers, weights).loss


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


@dataclass(frozen=True)
class ChosenRows:
    """Rows: their numbers among those of all tasks, their points and weights; keys, once there are any."""

    numbers: Array
    points: Points
    weights: Array
    keys: Array = field(default_factory=lambda: np.empty(0))

    def with_keys(self, keys: Array) -> ChosenRows:
        """Return the same rows with keys."""
        return ChosenRows(self.numbers, self.points, self.weights, keys)

    def as_centers(self) -> Array:
        """Return the points as an array."""
        return as_centers(self.points)

    def smallest(self, count: int) -> ChosenRows:
        """Return the rows with the smallest finite keys; of equal ones those with the smallest numbers."""
        kept = np.flatnonzero(np.isfinite(self.keys))
        if len(kept) > count:
            kept = kept[self.keys[kept] <= np.partition(self.keys[kept], count - 1)[count - 1]]
        order = kept[np.lexsort((self.numbers[kept], self.keys[kept]))][:count]
        return ChosenRows(self.numbers[order], self.points[order], self.weights[order], self.keys[order])


def all_rows(c: IterationStep, reader: PointReader) -> Iterator[ChosenRows]:
    """Yield the rows of each of this task's blocks."""
    begin = c.row_range.start
    for block in c.blocks:
        points, weights = reader.of_block(block)
        weights = np.ones(points.shape[0]) if weights is None else weights
        yield ChosenRows(np.arange(begin, begin + len(weights)), points, weights)
        begin += len(weights)


def rows_by_number(c: IterationStep, reader: PointReader, numbers: Array) -> Iterator[ChosenRows]:
    """Yield, of each of this task's blocks, the rows with these numbers, which increase."""
    begin = c.row_range.start
    for block in c.blocks:
        first, last = np.searchsorted(numbers, [begin, begin + block.X.shape[0]])
        places = numbers[first:last] - begin
        weights = getattr(block, "sample_weight", None)
        weights = np.ones(len(places)) if weights is None else np.asarray(weights[places], np.float64)
        yield ChosenRows(numbers[first:last], reader.points(block.X[places]), weights)
        begin += block.X.shape[0]


def choose_rows(c: IterationStep, blocks: Iterable[ChosenRows], count: int, keys: Keys) -> ChosenRows:
    """Return up to `count` rows of all tasks, those with the smallest finite keys. All tasks call it.

    `blocks`: rows of each of this task's blocks.
    """
    chosen: list[ChosenRows] = []
    for block_no, rows in zip(c.block_range, blocks):
        rows = rows.with_keys(keys(rows.points, rows.weights, block_no)).smallest(count)
        chosen = [_smallest([*chosen, rows], count)]
    return _smallest([rows for task in c.gather(chosen) for rows in task], count)


def random_keys(seed: list[int]) -> Keys:
    """Return keys by which rows are drawn without replacement, with probabilities in proportion to their weights."""

    def keys(points: Points, weights: Array, block_no: int) -> Array:
        random = np.random.default_rng([*seed, block_no])
        with np.errstate(divide="ignore"):  # a row without weight is never drawn
            drawn: Array = random.exponential(size=len(weights)) / weights
        return drawn

    return keys


def _smallest(parts: list[ChosenRows], count: int) -> ChosenRows:
    numbers, weights, keys = map(np.concatenate, zip(*((p.numbers, p.weights, p.keys) for p in parts)))
    points = join_points([part.points for part in parts])
    return ChosenRows(numbers, points, weights, keys).smallest(count)
