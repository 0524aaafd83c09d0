"""The rows of queries, which a ranking compares with each other, and the derivatives of LambdaRank.

The rows of a query are next to each other. A query whose rows are on several tasks crosses: its derivatives need the
scores of all its rows, which these tasks exchange. All tasks compute the same numbers from them, so the
derivatives do not depend on the number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde._native import tree_derive_groups
from ronde.comqueue import IterationStep

__all__ = [
    "TaskQueries",
    "check_queries",
    "check_weights",
    "ndcg_of_queries",
    "query_starts",
    "relevance_problem",
    "task_queries",
]

Array = NDArray[Any]

MOST_RELEVANCE = 31  # cpp/trees/ranking.h
UNSORTED = "has rows in several places: sort the rows, and y and qid with them, by qid"
SEVERAL_WEIGHTS = "sample_weight has {} and {} in one query: expected one weight for all rows of a query"


@dataclass(frozen=True)
class TaskQueries:
    """The queries of all tasks, and which rows of a task are in them.

    Attributes:
        starts: Of all tasks: the number of the first row of each query, and the number of rows.
        first_row: The number of the task's first row.
        whole: From which to which own row there are queries of which this task has all rows.
        crossing_starts: Likewise of the rows of crossing queries, in the order of the tasks.
        crossing_y: The relevances of these rows.
        first_crossing: Which of these rows is the first one of this task.
        is_held: bool, of each query of all tasks: whether it is held out.
        weights: float64, of each query of all tasks.
    """

    starts: Array
    first_row: int
    whole: tuple[int, int]
    crossing_starts: Array
    crossing_y: Array
    first_crossing: int
    is_held: Array
    weights: Array

    def derive(
        self,
        c: IterationStep,
        y: Array,
        scores: Array,
        truncation: int,
        gradients: Array,
        hessians: Array,
        threads: int,
    ) -> tuple[Array, Array]:
        """Fill gradients and hessians of the rows of this task, float64 of shape (rows,), times the weights of their
        queries; 0 of queries held out.

        Returns which queries begin on this task, their numbers, and the losses of these. All tasks must call it.
        """
        begin, end = self.whole
        count, last_row = len(y), self.first_row + len(y)
        own = np.arange(*np.searchsorted(self.starts[:-1], (self.first_row, last_row)))
        starts = self.starts[
            (self.starts >= self.first_row + begin) & (self.starts <= self.first_row + end)
        ] - (self.first_row + begin)
        inside = slice(begin, end)
        found = np.zeros(max(0, len(starts) - 1))
        if len(found):
            tree_derive_groups(
                y[inside],
                np.ascontiguousarray(scores[inside]),
                starts,
                truncation,
                gradients[inside],
                hessians[inside],
                found,
                threads,
            )
        if len(self.crossing_starts) > 1:
            parts = c.gather(np.concatenate([scores[:begin], scores[end:]]))
            derivatives, of_crossing = self._derive_crossing(np.concatenate(parts), truncation)
            at = self.first_crossing
            for to, values in zip((gradients, hessians), derivatives):
                to[:begin] = values[at : at + begin]
                to[end:] = values[at + begin : at + begin + count - end]
            if len(own) > len(found):  # the last query goes on in the next task
                number = int(np.searchsorted(self.crossing_starts, at + begin))
                found = np.append(found, of_crossing[number])
        factors = self.rows_of(np.where(self.is_held, 0.0, self.weights), count)
        gradients *= factors
        hessians *= factors
        return own, found

    def _derive_crossing(self, scores: Array, truncation: int) -> tuple[tuple[Array, Array], Array]:
        gradients, hessians = np.zeros(len(scores)), np.zeros(len(scores))
        losses = np.zeros(len(self.crossing_starts) - 1)
        tree_derive_groups(
            self.crossing_y, scores, self.crossing_starts, truncation, gradients, hessians, losses, 1
        )
        return (gradients, hessians), losses

    def rows_of(self, of_queries: Array, count: int) -> Array:
        """Return for each row of this task, of which there are `count`, the value of its query."""
        rows = np.arange(self.first_row, self.first_row + count)
        return np.asarray(of_queries[np.searchsorted(self.starts, rows, side="right") - 1])


def query_starts(qid: Array) -> Array:
    """Return at which rows another query begins, the first row included, and the number of rows; int64."""
    changes = np.flatnonzero(qid[1:] != qid[:-1]) + 1
    return np.concatenate([np.zeros(min(1, len(qid)), np.int64), changes, [len(qid)]]).astype(np.int64)


def check_queries(ids: Array) -> None:
    """Raise ValueError if a query has rows in several places. `ids`: of runs of rows, in their order."""
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"query {values[counts.argmax()].item()!r} of qid {UNSORTED}")


def check_weights(weights: Array, starts: Array) -> None:
    """Raise ValueError if rows of a query have several weights. `starts`: as of `query_starts`."""
    firsts = weights[starts[:-1]].repeat(np.diff(starts))
    if (weights != firsts).any():
        row = int((weights != firsts).argmax())
        raise ValueError(SEVERAL_WEIGHTS.format(firsts[row], weights[row]))


def task_queries(c: IterationStep, qid: Array, y: Array, weights: Array) -> TaskQueries:
    """Return the queries of all tasks. `qid`, `y` and `weights`: of the rows of this task.

    Raises ValueError if a query has rows in several places, or of several weights.
    """
    starts = query_starts(qid)
    check_weights(weights, starts)
    parts = c.gather((qid[starts[:-1]], np.diff(starts), weights[starts[:-1]]))
    ids, sizes, all_weights = (np.concatenate(each) for each in zip(*parts))
    is_new = np.append(True, ids[1:] != ids[:-1])  # the others go on from the task before
    check_queries(ids[is_new])
    check_weights(all_weights, np.append(np.flatnonzero(is_new), len(ids)))
    ends = np.append(np.cumsum(sizes) - sizes, sizes.sum())
    all_starts = ends[np.append(is_new, True)].astype(np.int64)
    task_ends = np.cumsum([0, *(int(part.sum()) for _, part, _ in parts)])
    first = int(task_ends[c.task_id])
    crosses = _crossing(all_starts, task_ends)
    begin, end = _whole(all_starts, crosses, first, first + len(y))
    of_tasks = c.gather(np.concatenate([y[:begin], y[end:]]))
    return TaskQueries(
        all_starts,
        first,
        (begin, end),
        np.append(0, np.cumsum(np.diff(all_starts)[crosses])).astype(np.int64),
        np.concatenate(of_tasks),
        sum(len(part) for part in of_tasks[: c.task_id]),
        np.zeros(len(all_starts) - 1, bool),
        all_weights[is_new],
    )


def _crossing(starts: Array, task_ends: Array) -> Array:
    """Return which queries have rows of several tasks."""
    tasks_of_ends = np.searchsorted(task_ends, starts[1:] - 1, side="right")
    return np.asarray(np.searchsorted(task_ends, starts[:-1], side="right") != tasks_of_ends)


def _whole(starts: Array, crosses: Array, first: int, last: int) -> tuple[int, int]:
    """Return from which to which row of a task, which has those from `first` to `last`, no query crosses."""
    begin, end = 0, last - first
    for number in np.flatnonzero(crosses).tolist():
        at, behind = int(starts[number]), int(starts[number + 1])
        if at < first < behind:
            begin = min(behind, last) - first
        elif first <= at < last < behind:
            end = at - first
    return begin, max(begin, end)


def ndcg_of_queries(y: Array, scores: Array, starts: Array, truncation: int) -> Array:
    """Return the NDCG of the first rows by score of each query, float64; 1 of a query without a relevant row.

    Rows of equal scores are ranked by their order. `starts`: as of `query_starts`.
    """
    unused, losses = np.zeros(len(y)), np.zeros(len(starts) - 1)
    tree_derive_groups(y, scores, starts, truncation, unused, unused.copy(), losses, 1)
    return 1 - losses


def relevance_problem(y: Array) -> str | None:
    """Return what is wrong with relevances; None: nothing."""
    is_wrong = (y != np.floor(y)) | (y < 0) | (y > MOST_RELEVANCE)
    if is_wrong.any():
        return f"y has {y[is_wrong][0]:g}, which is no relevance: expected whole numbers from 0 to {MOST_RELEVANCE}"
    return None
