"""Gradient boosting as a step of `iterate`: each step grows a tree for each score, and adds it to the model.

A step depends on the state, which consists of the trees, and on the rows. All else that a task has, such as the bins
and scores of its rows, follows from these, so that tasks which start again from a checkpoint make it anew, with the
same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ronde._native import tree_derive
from ronde.comqueue import IterationStep
from ronde.ml.trees.bins import Bins, chosen_rows, find_bins, sample_size
from ronde.ml.trees.growing import (
    BinnedTask,
    GrownTree,
    TreeRules,
    grow_tree,
    leaf_quantiles,
    leaf_sums,
    newton_values,
    tree_seed,
)
from ronde.ml.trees.losses import BoostingLoss, OwnLoss, derive_own
from ronde.ml.trees.queries import TaskQueries, task_queries
from ronde.ml.trees.trees import Tree, add_predictions, joined_trees, thread_count
from ronde.types import Max

__all__ = ["BoostingReport", "BoostingRules", "BoostingStep", "first_state", "read_rows"]

Array = NDArray[Any]

SAMPLE, HELD, SUBSAMPLE = range(3)  # uses of random numbers, added to the seed of the fit


@dataclass(frozen=True)
class BoostingRules:
    """How a fit goes.

    Attributes:
        learning_rate: The factor of the values of leaves.
        max_bins: Of a column, at most 255.
        is_categorical: By column.
        held_fraction: How many rows are held out; 0: none.
        patience: The fit ends after so many steps that do not lower the loss, of rows held out if there are any; 0: it
            does not.
        tol: A loss has to be lower by more.
        row_fraction: How many rows are drawn for each step.
        seed: Of random numbers.
        earlier_losses: Of the steps of an earlier fit that a warm start continues; with these the fit may end at once.
    """

    loss: BoostingLoss
    tree: TreeRules
    learning_rate: float
    max_bins: int
    is_categorical: Array
    held_fraction: float
    patience: int
    tol: float
    row_fraction: float
    seed: int
    earlier_losses: tuple[float, ...] = ()


class BoostingReport(Protocol):
    """Gets the record of each step and the state, on task 0; returns whether a callback ends the fit."""

    def __call__(self, record: Mapping[str, Any], state: Any) -> bool: ...


def first_state(
    bins: Bins | None = None, baseline: Array | None = None, trees: Sequence[Tree] = ()
) -> dict[str, Any]:
    """Return the state before the first step; of a warm start with bins, baseline and trees of an earlier fit."""
    return {
        "bins": bins and bins.plain,
        "baseline": baseline,
        "trees": list(trees),
        "losses": [],
        "held_losses": [],
    }


@dataclass
class BoostedTask:
    """What a task has, beside the state."""

    rows: BinnedTask
    y: Array
    integer_weights: Array | None  # of quantiles
    is_held: Array | None
    total: float  # weights of all rows that count
    held_total: float
    block_starts: Array
    scores: Array
    gradients: Array
    hessians: Array
    queries: TaskQueries | None  # of a ranking


class BoostingStep:
    """A step of boosting.

    Args:
        rules: Those of the fit.
        report: Gets the record of each step.
    """

    def __init__(self, rules: BoostingRules, report: BoostingReport) -> None:
        self._rules, self._report = rules, report
        self._task: BoostedTask | None = None

    def __deepcopy__(self, memo: object) -> BoostingStep:
        return BoostingStep(self._rules, self._report)

    def __reduce__(self) -> tuple[Any, ...]:
        return BoostingStep, (self._rules, self._report)

    def __call__(self, c: IterationStep) -> None:
        if self._task is None:
            self._task = self._begin(c)
        for column in range(self._rules.loss.score_count):
            self._add_tree(c, self._task, column)
        self._derive(c, self._task)
        record = {"step": c.step_no, "loss": c.state.losses[-1]}
        if self._task.is_held is not None:
            record["validation_loss"] = c.state.held_losses[-1]
        ends = self._has_ended(c.state) or not np.isfinite(record["loss"])
        should_stop = c.task_id == 0 and self._report(record, c.state)
        c.stop_if(should_stop or ends)

    def _begin(self, c: IterationStep) -> BoostedTask:
        """Return what the task has before the first step, or after its trees so far."""
        rules, loss, state = self._rules, self._rules.loss, c.state
        rows, y, block_starts = read_rows(c, rules.max_bins, rules.is_categorical, rules.seed + SAMPLE)
        weights = np.ones(len(y)) if rows.weights is None else rows.weights
        queries = self._queries(c, y, weights) if loss.truncation else None
        is_held = self._held_rows(c, rows, len(y)) if queries is None else _rows_of_held(queries, len(y))
        used = weights if is_held is None else np.where(is_held, 0.0, weights)
        sums = self._sums(c, block_starts, used, weights, y)
        scores = np.zeros((len(y), loss.score_count))
        task = BoostedTask(
            rows,
            y,
            _integer_weights(c, rows),
            is_held,
            float(sums[:-1].sum() if loss.score_count > 1 else sums[0]),
            float(sums[-1]),
            block_starts,
            scores,
            np.zeros_like(scores),
            np.zeros_like(scores),
            queries,
        )
        if queries is not None:
            task.total = float(queries.weights[~queries.is_held].sum())
            task.held_total = float(queries.weights[queries.is_held].sum())
        if state.baseline is None:
            state.baseline = self._baseline(c, task, sums)
        scores += state.baseline
        if state.trees:
            trees = joined_trees(state.trees, loss.score_count)
            add_predictions(trees, rows.bins, rows.binned, scores, rows.threads)
        if state.losses:
            state.losses.pop()  # `_derive` computes the last ones again
            del state.held_losses[-1:]
        self._derive(c, task)
        return task

    def _held_rows(self, c: IterationStep, rows: BinnedTask, count: int) -> Array | None:
        fraction = self._rules.held_fraction
        if not fraction:
            return None
        numbers = range(rows.first_row, rows.first_row + count)
        is_held = chosen_rows(self._rules.seed + HELD, numbers, fraction)
        counted = is_held if rows.weights is None else is_held & (rows.weights > 0)
        found = np.array(
            [counted.sum(), (~counted if rows.weights is None else ~is_held & (rows.weights > 0)).sum()]
        )
        c.reduce_in_place(found)
        return is_held.astype(np.uint8) if found.all() else None

    def _queries(self, c: IterationStep, y: Array, weights: Array) -> TaskQueries:
        """Return the queries, of which some are held out whole."""
        qid = [np.asarray(block.qid) for block in c.blocks] if c.is_streamed else [np.asarray(c.data.qid)]
        queries = task_queries(c, np.concatenate(qid) if qid else np.empty(0, np.int64), y, weights)
        fraction = self._rules.held_fraction
        if fraction:
            is_held = chosen_rows(self._rules.seed + HELD, queries.starts[:-1], fraction)
            if queries.weights[is_held].sum() > 0 and queries.weights[~is_held].sum() > 0:
                queries = replace(queries, is_held=is_held)
        return queries

    def _sums(self, c: IterationStep, block_starts: Array, used: Array, weights: Array, y: Array) -> Array:
        """Return the sums for `BoostingLoss.baseline`, and the weight of rows held out, over all tasks."""
        classes = self._rules.loss.score_count

        def of(begin: int, end: int) -> Array:
            some = used[begin:end]
            held = weights[begin:end].sum() - some.sum()
            if classes > 1:
                return np.append(np.bincount(y[begin:end].astype(np.intp), some, classes), held)
            return np.array([some.sum(), (some * y[begin:end]).sum(), held])

        return _sum_by_blocks(c, [of(*each) for each in zip(block_starts, block_starts[1:])])

    def _baseline(self, c: IterationStep, task: BoostedTask, sums: Array) -> Array:
        loss = self._rules.loss
        if loss.first_quantile is None:
            return loss.baseline(sums[:-1])
        return self._quantile(c, task, task.y, loss.first_quantile)

    def _quantile(self, c: IterationStep, task: BoostedTask, numbers: Array, quantile: float) -> Array:
        """Return a quantile of numbers, one for each row, over the rows of all tasks that count; shape (1,)."""
        count = len(task.y)
        is_out = np.zeros(count, bool) if task.is_held is None else task.is_held > 0
        if task.rows.weights is not None:
            is_out |= task.rows.weights == 0
        root = GrownTree(
            {},
            np.zeros(1, np.intp),
            np.empty((1, 2)),
            np.arange(count, dtype=np.uint32),
            np.array([[0, count]], np.int64),
            (~is_out).astype(np.int64),
        )
        zeros = np.zeros(count)
        return leaf_quantiles(c, task.rows, root, numbers, zeros, task.integer_weights, quantile)

    def _derive(self, c: IterationStep, task: BoostedTask) -> None:
        """Compute the derivatives of the loss at the scores, and append the losses to the state."""
        loss = self._rules.loss
        if task.queries is not None:
            losses = _derive_ranking(c, task, task.queries, loss.truncation)
        elif loss.own is not None:
            losses = _derive_own(task, loss.own)
        else:
            losses = self._derive_natively(c, task)
        sums = _sum_by_blocks(c, list(losses))
        c.state.losses.append(float(sums[0]) / task.total)
        if task.is_held is not None:
            c.state.held_losses.append(float(sums[1]) / task.held_total)

    def _derive_natively(self, c: IterationStep, task: BoostedTask) -> Array:
        """Return the sums of losses of each block, of rows that count and of those held out."""
        loss, losses = self._rules.loss, np.zeros((len(task.block_starts) - 1, 2))
        parameter = loss.parameter
        if loss.size_quantile is not None:
            sizes = np.abs(task.y - task.scores[:, 0])
            parameter = float(self._quantile(c, task, sizes, loss.size_quantile)[0]) or np.inf
        tree_derive(
            loss.number,
            parameter,
            task.y,
            task.rows.weights,
            task.is_held,
            task.scores,
            task.block_starts,
            task.gradients,
            task.hessians,
            losses,
            task.rows.threads,
        )
        return losses

    def _add_tree(self, c: IterationStep, task: BoostedTask, column: int) -> None:
        rules, number = self._rules, len(c.state.trees)
        seed = tree_seed(rules.seed, number)
        is_out = self._rows_out(c, task, number - column)
        tree = grow_tree(c, task.rows, rules.tree, task.gradients, task.hessians, column, is_out, seed)
        if rules.loss.quantile is None:
            sums = leaf_sums(c, task.rows, tree, task.gradients, task.hessians, column)
            values = newton_values(sums, rules.tree, tree.bounds)
        else:
            values = leaf_quantiles(
                c, task.rows, tree, task.y, task.scores[:, 0], task.integer_weights, rules.loss.quantile
            )
            values = np.clip(values, tree.bounds[:, 0], tree.bounds[:, 1])
        values = rules.learning_rate * values
        tree.add_to(task.scores, column, values, task.rows.threads)
        c.state.trees.append(tree.with_values(values))

    def _rows_out(self, c: IterationStep, task: BoostedTask, number: int) -> Array | None:
        """Return which rows do not count for the trees of a step. `number`: that of its first tree."""
        if self._rules.row_fraction >= 1:
            return task.is_held
        first = task.rows.first_row
        seed = tree_seed(self._rules.seed + SUBSAMPLE, number)
        is_chosen = chosen_rows(seed, range(first, first + len(task.y)), self._rules.row_fraction)
        is_out = ~is_chosen if task.is_held is None else ~is_chosen | (task.is_held > 0)
        return is_out.astype(np.uint8)

    def _has_ended(self, state: Any) -> bool:
        """Return whether none of the last steps has lowered the loss."""
        patience = self._rules.patience
        of_steps = state.losses if self._task is None or self._task.is_held is None else state.held_losses
        losses = [*self._rules.earlier_losses, *of_steps]
        if not patience or len(losses) <= patience:
            return False
        return not min(losses[-patience:]) < losses[-patience - 1] - self._rules.tol


def read_rows(
    c: IterationStep, max_bins: int, is_categorical: Array, seed: int
) -> tuple[BinnedTask, Array, Array]:
    """Return the rows of this task, their targets as float64, and where its blocks begin and the last one ends.

    Sets `c.state.bins` unless there are bins. Raises ValueError as `find_bins` does.
    """
    numbers, columns = c.row_range, len(is_categorical)
    cores = thread_count(len(numbers) * columns)
    threads = max(1, cores // c.tasks_here)
    if c.state.bins is None:
        sample, weights = _sample(c, sample_size(columns), seed)
        c.state.bins = find_bins(sample, weights, max_bins, is_categorical).plain
    bins = Bins(**c.state.bins)
    if c.is_streamed:
        binned, y, weight, ends = _streamed_rows(c, bins, threads)
    else:
        data = c.data
        ends = np.cumsum([0, *(len(block.y) for block in c.blocks)], dtype=np.int64)
        binned, y = bins.of(data.X, threads), np.ascontiguousarray(data.y, np.float64)
        weight = getattr(data, "sample_weight", None)
        weight = None if weight is None else np.ascontiguousarray(weight, np.float64)
    rows = BinnedTask(bins, binned, weight, numbers.start, c.num_rows, threads)
    return rows, y, ends


def _streamed_rows(c: IterationStep, bins: Bins, threads: int) -> tuple[Array, Array, Array | None, Array]:
    """Return bins, targets and weights (None: 1 each) of the rows of this task, and where blocks begin and end.

    Each block is written to its place and kept no longer, so that memory contains no row twice.
    """
    count, ends = len(c.row_range), [0]
    binned, y, weights = bins.empty(count), np.empty(count), None
    for block in c.blocks:
        begin, end = ends[-1], ends[-1] + len(block.y)
        bins.put(block.X, binned, begin, threads)
        y[begin:end] = block.y
        if hasattr(block, "sample_weight"):
            weights = np.empty(count) if weights is None else weights
            weights[begin:end] = block.sample_weight
        ends.append(end)
    return binned, y, weights, np.array(ends, np.int64)


def _sample(c: IterationStep, size: int, seed: int) -> tuple[Array, Array | None]:
    """Return about so many rows that have a weight, or all if there are fewer, and their weights; None: 1 each."""
    fraction = size / max(1, c.num_rows)
    sample, weights = _drawn(c, fraction, seed)
    if fraction < 1 and len(sample) < size // 2:  # few rows have a weight
        sample, weights = _drawn(c, fraction * size / max(1, len(sample)), seed)
    return sample, weights


def _drawn(c: IterationStep, fraction: float, seed: int) -> tuple[Array, Array | None]:
    """Return a part of the rows of all tasks, without those that have no weight, and their weights."""
    chosen = None if fraction >= 1 else chosen_rows(seed, c.row_range, fraction)
    parts = [part for task in c.gather(_sample_of(c, chosen)) for part in task]
    weights = None if parts[0][1] is None else np.concatenate([weight for _, weight in parts])
    return np.concatenate([part for part, _ in parts]), weights


def _sample_of(c: IterationStep, chosen: Array | None) -> list[tuple[Array, Array | None]]:
    """Return the rows of this task that are chosen and have a weight, and their weights, by block."""
    if chosen is None and not c.is_streamed and c.num_tasks == 1 and not hasattr(c.data, "sample_weight"):
        return [(c.data.X, None)]
    parts, at = [], 0
    for block in c.blocks:
        count, weights = len(block.y), getattr(block, "sample_weight", None)
        takes = np.ones(count, bool) if chosen is None else chosen[at : at + count]
        if weights is not None:
            takes = takes & (weights > 0)
        parts.append((block.X[takes], None if weights is None else weights[takes]))
        at += count
    return parts


def _derive_own(task: BoostedTask, own: OwnLoss) -> Array:
    """Derive a user's loss block by block, so that it gets the same rows for any number of tasks. Returns the sums."""
    sums, weights, is_held = [], task.rows.weights, task.is_held
    for rows in (slice(*each) for each in zip(task.block_starts, task.block_starts[1:])):
        gradients, hessians, losses = derive_own(
            own,
            task.y[rows],
            task.scores[rows, 0],
            None if weights is None else weights[rows],
            None if is_held is None else is_held[rows],
        )
        task.gradients[rows, 0], task.hessians[rows, 0] = gradients, hessians
        sums.append(losses)
    return np.array(sums).reshape(-1, 2)


def _rows_of_held(queries: TaskQueries, count: int) -> Array | None:
    return queries.rows_of(queries.is_held, count).astype(np.uint8) if queries.is_held.any() else None


def _derive_ranking(c: IterationStep, task: BoostedTask, queries: TaskQueries, truncation: int) -> Array:
    """Return the sums of the losses of each block, of queries that count and of those held out.

    The loss of a query counts in the block of its first row.
    """
    gradients, hessians = task.gradients[:, 0], task.hessians[:, 0]  # one score: these are contiguous
    own, found = queries.derive(
        c, task.y, task.scores[:, 0], truncation, gradients, hessians, task.rows.threads
    )
    count = len(task.block_starts) - 1
    places = queries.starts[own] - queries.first_row
    blocks = np.searchsorted(task.block_starts, places, side="right") - 1
    is_held, found = queries.is_held[own], found * queries.weights[own]
    sums = [
        np.bincount(blocks, np.where(counts, found, 0.0), count)[:count] for counts in (~is_held, is_held)
    ]
    return np.stack(sums, axis=1)


def _sum_by_blocks(c: IterationStep, by_block: Sequence[Array]) -> Array:
    """Return the sum of arrays, one for each block of this task, over all tasks."""
    return np.asarray(c.sum_by_block(by_block))


def _integer_weights(c: IterationStep, rows: BinnedTask) -> Array | None:
    """Return weights as int64, for sums in any order; None: 1 each."""
    if rows.weights is None:
        return None
    most = np.array([rows.weights.max(initial=0.0)])
    c.reduce_in_place(most, Max)
    scale = 2.0 ** (52 - int(rows.num_rows).bit_length()) / max(float(most[0]), 1e-290)
    return np.rint(rows.weights * scale).astype(np.int64)
