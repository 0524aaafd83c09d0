"""The step of k-means (Lloyd's algorithm), for one or several runs from different starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.clustering.block_points import PointReader
from ronde.ml.clustering.center_assignment import Centers, find_nearest, sum_nearest
from ronde.ml.clustering.chosen_rows import all_rows
from ronde.ml.clustering.empty_clusters import farthest_rows, move_rows
from ronde.ml.clustering.geometry import GEOMETRIES
from ronde.ml.clustering.points import as_centers, column_moments
from ronde.ml.clustering.starts import draw_centers
from ronde.ml.progress import Progress

__all__ = [
    "AssignRows",
    "LloydStep",
    "RowAssignment",
    "Runs",
    "final_centers",
    "first_state",
    "squared_distance",
    "tolerance_of",
]

Array = NDArray[Any]


@dataclass(frozen=True)
class Runs:
    """What is asked for.

    Attributes:
        reader: Makes points of rows.
        count: The number of centers.
        start: The first centers of each run, as points; or "k-means||", "k-means++" or "random".
        number: How many runs.
        max_iter: How many steps a run has at most.
        tol: The squared distance, relative to the variance of the points, by which all centers together may still move
            in the last step.
        seed: Of the draws.
    """

    reader: PointReader
    count: int
    start: Sequence[Array] | str
    number: int
    max_iter: int
    tol: float
    seed: int


def first_state() -> dict[str, Any]:
    """Return the state with which the steps of `LloydStep` begin.

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


class LloydStep:
    """Assigns all rows to their nearest centers, and moves the centers to the means of their rows."""

    def __init__(self, runs: Runs, progress: Progress) -> None:
        self._runs, self._progress = runs, progress
        self._geometry = GEOMETRIES[runs.reader.metric]

    def __call__(self, c: IterationStep) -> None:
        runs, state = self._runs, c.state
        if state.tolerance is None:
            state.tolerance = tolerance_of(c, runs.reader, runs.tol)
            state.seed = c.broadcast(runs.seed)  # the ranks of a job may have drawn different ones
        if state.centers is None:
            state.centers, state.steps = self._start(c), 0
        centers, loss = self._moved(c)
        moved = squared_distance(centers, state.centers)
        state.centers = centers
        state.steps += 1
        record = dict(step=c.step_no, loss=loss, moved=moved, run=state.run + 1)
        state.records.append(record)
        ends = moved <= state.tolerance or state.steps == runs.max_iter
        if ends:
            self._end_run(c)
        should_stop = c.task_id == 0 and self._progress(record, lambda: self._attributes(state))
        c.stop_if(should_stop or (ends and state.run == runs.number))

    def _start(self, c: IterationStep) -> Array:
        runs = self._runs
        if isinstance(runs.start, str):
            return draw_centers(c, runs.reader, runs.count, runs.start, [c.state.seed, c.state.run])
        # A function may have drawn other ones on other ranks.
        centers: Array = c.broadcast(runs.start[c.state.run])
        return centers

    def _moved(self, c: IterationStep) -> tuple[Array, float]:
        """Return the new centers, and the loss with the old ones."""
        reader, centers = self._runs.reader, c.state.centers
        prepared = Centers(centers)

        def sums_of(block: Any) -> dict[str, Any]:
            points, weights = reader.of_block(block)
            return sum_nearest(points, prepared, weights)

        total = c.sum_blocks(sums_of)
        sums, loss = total["sums"], float(total["loss"]) * self._geometry.loss_scale
        if np.isnan(loss):
            raise ValueError("X contains NaN or infinity: leave such rows out, or replace the values")
        empty = np.flatnonzero(sums[:, -1] == 0)
        if len(empty):
            move_rows(sums, centers, empty, farthest_rows(c, all_rows(c, reader), centers, len(empty)))
        return self._geometry.means(sums[:, :-1], sums[:, -1], centers), loss

    def _end_run(self, c: IterationStep) -> None:
        """Keep the centers of this run if they are the best so far, and let the next step start another run."""
        state = c.state
        loss = None
        if self._runs.number > 1:
            prepared = Centers(state.centers)
            loss = c.sum_blocks(lambda block: _loss(self._runs.reader, prepared, block))
        if state.best is None or loss < state.best_loss:
            state.best, state.best_loss, state.best_steps = state.centers, loss, state.steps
        state.run += 1
        state.centers = None

    def _attributes(self, state: SimpleNamespace) -> dict[str, Any]:
        """Return what the estimator would have as attributes if the fit ended with this state."""
        return {"cluster_centers_": self._runs.reader.rows(final_centers(state))}


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
        loss = float(total["loss"]) * GEOMETRIES[self._reader.metric].loss_scale
        kept = np.concatenate(labels) if self._keeps_labels else None
        return RowAssignment(kept, loss, int(np.count_nonzero(total["counts"])))


def final_centers(state: SimpleNamespace) -> Array:
    """Return the centers with which the fit ends, also if a callback has ended it in its first run."""
    centers: Array = state.centers if state.best is None else state.best
    return centers


def _loss(reader: PointReader, centers: Centers, block: Any) -> float:
    points, weights = reader.of_block(block)
    return find_nearest(points, centers, weights).loss
