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
from scipy.sparse import vstack

from ronde._native import tree_derive
from ronde.comqueue import IterationStep
from ronde.ml.source_data import is_sparse
from ronde.ml.trees.bins import Bins, chosen_rows, find_bins, hashed_rows, sample_size
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
from ronde.ml.trees.validation import ROWS_OF_SCORES, GivenRows, ScoredRows, Scoring, joined_rows
from ronde.types import Max, Min

__all__ = ["BoostingReport", "BoostingRules", "BoostingStep", "first_state", "read_rows", "record_of"]

Array = NDArray[Any]

SAMPLE, HELD, SUBSAMPLE, SCORED = range(4)  # uses of random numbers, added to the seed of the fit


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
        given: Rows by whose loss the fit ends, in the place of rows held out.
        scoring: What judges a step in the place of the loss.
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
    given: GivenRows | None = None
    scoring: Scoring | None = None


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
        "scores": [],
        "held_scores": [],
    }


def record_of(state: Any, number: int) -> dict[str, float]:
    """Return the record of a step of this fit, without its number. `number`: 0 is that before the first step."""
    lists = {
        "loss": state.losses,
        "validation_loss": state.held_losses,
        "score": state.scores,
        "validation_score": state.held_scores,
    }
    return {name: values[number] for name, values in lists.items() if values}


@dataclass
class GivenTask:
    """The rows of `BoostingRules.given`, which each task has.

    Attributes:
        rows: With their scores so far.
        derivatives: Room for those of the loss, which nothing reads.
    """

    rows: GivenRows
    bins: Bins
    binned: Array
    scores: Array
    threads: int
    derivatives: tuple[Array, Array]

    def add(self, trees: Sequence[Tree]) -> None:
        """Add the values of trees, the first of which adds to score 0."""
        joined = joined_trees(trees, self.scores.shape[1])
        add_predictions(joined, self.bins, self.binned, self.scores, self.threads)

    def mean_loss(self, loss: BoostingLoss, parameter: float) -> float:
        """Return the mean loss. `parameter`: of the native loss."""
        y, weights = self.rows.y, self.rows.weights
        total = float(len(y) if weights is None else weights.sum())
        if loss.own is not None:
            return float(derive_own(loss.own, y, self.scores[:, 0], weights, None)[2][0]) / total
        losses, block = np.zeros((1, 2)), np.array([0, len(y)], np.int64)
        tree_derive(
            loss.number,
            parameter,
            y,
            weights,
            None,
            self.scores,
            block,
            *self.derivatives,
            losses,
            self.threads,
        )
        return float(losses[0, 0]) / total


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
    parameter: float = 0.0  # of the native loss in the last step
    given: GivenTask | None = None
    scored: tuple[ScoredRows, ScoredRows | None] | None = None  # those of the fit and those of the validation

    @property
    def has_held(self) -> bool:
        """Whether there are rows that do not grow trees, by whose loss the fit ends."""
        return self.is_held is not None or self.given is not None


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
        if self._task.given is not None:
            self._task.given.add(c.state.trees[-self._rules.loss.score_count :])
        self._derive(c, self._task)
        record = {"step": c.step_no, **record_of(c.state, -1)}
        ends = self._has_ended(c.state) or not np.isfinite(record["loss"])
        should_stop = c.task_id == 0 and self._report(record, c.state)
        c.stop_if(should_stop or ends)

    def _begin(self, c: IterationStep) -> BoostedTask:
        """Return what the task has before the first step, or after its trees so far."""
        rules, loss, state = self._rules, self._rules.loss, c.state
        rows, y, block_starts = read_rows(c, rules.max_bins, rules.is_categorical, rules.seed + SAMPLE)
        weights = np.ones(len(y)) if rows.weights is None else rows.weights
        queries = self._queries(c, y, weights) if loss.truncation else None
        is_held = self._held_rows(c, rows, y) if queries is None else _rows_of_held(queries, len(y))
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
        if rules.given is not None:
            task.given = self._given_task(rules.given, state, rows)
        if rules.scoring is not None:
            task.scored = self._scored_rows(c, task)
        for each in (state.losses, state.held_losses, state.scores, state.held_scores):
            del each[-1:]  # `_derive` computes the last ones again
        self._derive(c, task)
        return task

    def _given_task(self, given: GivenRows, state: Any, rows: BinnedTask) -> GivenTask:
        """Return the given rows with the scores of the trees so far."""
        scores = np.tile(np.asarray(state.baseline, np.float64), (len(given.y), 1))
        derivatives = np.zeros_like(scores), np.zeros_like(scores)
        binned = rows.bins.of(given.X, rows.threads)
        task = GivenTask(given, rows.bins, binned, scores, rows.threads, derivatives)
        if state.trees:
            task.add(state.trees)
        return task

    def _scored_rows(self, c: IterationStep, task: BoostedTask) -> tuple[ScoredRows, ScoredRows | None]:
        """Return a sample of the rows of the fit, and those of the validation if there are any, for a scorer."""
        count, first = len(task.y), task.rows.first_row
        held = np.zeros(count, bool) if task.is_held is None else task.is_held > 0
        fraction = ROWS_OF_SCORES / max(1, task.rows.num_rows)
        chosen = ~held
        if fraction < 1:
            seed, numbers = self._rules.seed + SCORED, range(first, first + count)
            chosen &= chosen_rows(seed, numbers, fraction)
            chosen = self._with_each_class(c, chosen, ~held, task.y, task.rows.weights, seed, numbers)
        of_fit = joined_rows(c, chosen, task.y, task.rows.weights)
        if task.given is not None:
            given = task.given.rows
            return of_fit, ScoredRows(None, given.X, given.y, given.weights)
        return of_fit, None if task.is_held is None else joined_rows(c, held, task.y, task.rows.weights)

    def _with_each_class(
        self,
        c: IterationStep,
        chosen: Array,
        candidates: Array,
        y: Array,
        weights: Array | None,
        seed: int,
        numbers: range,
    ) -> Array:
        """Return the chosen rows and, if a scorer gets them, one of each class of which none is chosen.

        Many scorers fail if a class is absent. A class with one candidate has none.
        """
        classes = 0 if self._rules.scoring is None else self._rules.scoring.num_classes
        if not classes:
            return chosen
        of_class, hashes = y.astype(np.intp), hashed_rows(seed, np.arange(numbers.start, numbers.stop))
        candidates = candidates if weights is None else candidates & (weights > 0)
        counts = np.stack(
            [np.bincount(of_class[each], minlength=classes) for each in (chosen & candidates, candidates)]
        )
        c.reduce_in_place(counts)
        least = np.full(classes, np.iinfo(np.uint64).max, np.uint64)
        np.minimum.at(least, of_class[candidates], hashes[candidates])
        c.reduce_in_place(least, Min)
        is_missing = (counts[0] == 0) & (counts[1] > 1)
        return np.asarray(chosen | candidates & is_missing[of_class] & (hashes == least[of_class]))

    def _held_rows(self, c: IterationStep, rows: BinnedTask, y: Array) -> Array | None:
        fraction, count = self._rules.held_fraction, len(y)
        if not fraction:
            return None
        seed, numbers = self._rules.seed + HELD, range(rows.first_row, rows.first_row + count)
        is_held = chosen_rows(seed, numbers, fraction)
        is_held = self._with_each_class(c, is_held, np.ones(count, bool), y, rows.weights, seed, numbers)
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
        elif task.given is not None:
            c.state.held_losses.append(task.given.mean_loss(loss, task.parameter))
        if self._rules.scoring is not None and task.scored is not None:
            for rows, to in zip(task.scored, (c.state.scores, c.state.held_scores)):
                if rows is not None:
                    to.append(self._score(c, task, rows, self._rules.scoring))

    def _score(self, c: IterationStep, task: BoostedTask, rows: ScoredRows, scoring: Scoring) -> float:
        """Return the score of rows, which task 0 computes."""
        if rows.chosen is None:
            assert task.given is not None
            scores = task.given.scores
        else:
            scores = np.concatenate(c.gather(task.scores[rows.chosen]))
        found = np.array([scoring.score(rows, scores, c.state) if c.task_id == 0 else 0.0])
        c.reduce_in_place(found)
        return float(found[0])

    def _derive_natively(self, c: IterationStep, task: BoostedTask) -> Array:
        """Return the sums of losses of each block, of rows that count and of those held out."""
        loss, losses = self._rules.loss, np.zeros((len(task.block_starts) - 1, 2))
        parameter = loss.parameter
        if loss.size_quantile is not None:
            sizes = np.abs(task.y - task.scores[:, 0])
            parameter = float(self._quantile(c, task, sizes, loss.size_quantile)[0]) or np.inf
        task.parameter = parameter
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
        has_held = self._task is not None and self._task.has_held
        if self._rules.scoring is None:
            of_steps = state.held_losses if has_held else state.losses
        else:
            of_steps = [-score for score in (state.held_scores if has_held else state.scores)]
        losses = [*self._rules.earlier_losses, *of_steps]
        if not patience or len(losses) <= patience:
            return False
        return not min(losses[-patience:]) < losses[-patience - 1] - self._rules.tol


def read_rows(
    c: IterationStep, max_bins: int, is_categorical: Array, seed: int, by_range: float = 0.0
) -> tuple[BinnedTask, Array, Array]:
    """Return the rows of this task, their targets as float64, and where its blocks begin and the last one ends.

    `by_range`: as of `find_bins`. Sets `c.state.bins` unless there are bins. Raises ValueError as `find_bins` does.
    """
    numbers, columns = c.row_range, len(is_categorical)
    cores = thread_count(len(numbers) * columns)
    threads = max(1, cores // c.tasks_here)
    if c.state.bins is None:
        sample, weights = _sample(c, sample_size(columns), seed)
        c.state.bins = find_bins(sample, weights, max_bins, is_categorical, by_range).plain
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


def _sample(c: IterationStep, size: int, seed: int) -> tuple[Any, Array | None]:
    """Return about so many rows that have a weight, or all if there are fewer, and their weights; None: 1 each."""
    fraction = size / max(1, c.num_rows)
    sample, weights = _drawn(c, fraction, seed)
    if fraction < 1 and sample.shape[0] < size // 2:  # few rows have a weight
        sample, weights = _drawn(c, fraction * size / max(1, sample.shape[0]), seed)
    return sample, weights


def _drawn(c: IterationStep, fraction: float, seed: int) -> tuple[Any, Array | None]:
    """Return a part of the rows of all tasks, without those that have no weight, and their weights."""
    chosen = None if fraction >= 1 else chosen_rows(seed, c.row_range, fraction)
    parts = [part for task in c.gather(_sample_of(c, chosen)) for part in task]
    weights = None if parts[0][1] is None else np.concatenate([weight for _, weight in parts])
    rows = [part for part, _ in parts]
    return vstack(rows, format="csr") if is_sparse(rows[0]) else np.concatenate(rows), weights


def _sample_of(c: IterationStep, chosen: Array | None) -> list[tuple[Any, Array | None]]:
    """Return the rows of this task that are chosen and have a weight, and their weights, by block."""
    if chosen is None and not c.is_streamed and c.num_tasks == 1 and not hasattr(c.data, "sample_weight"):
        return [(c.data.X, None)]
    parts, at = [], 0
    for block in c.blocks:
        count, weights = len(block.y), getattr(block, "sample_weight", None)
        takes = np.ones(count, bool) if chosen is None else chosen[at : at + count]
        if weights is not None:
            takes = takes & (weights > 0)
        parts.append((block.X[np.flatnonzero(takes)], None if weights is None else weights[takes]))
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
