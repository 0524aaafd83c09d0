"""Forests as a step of `iterate`: each step grows some trees, of which each task grows its part.

Each task has the bins of all rows, one byte for each value, so that a tree is grown by one thread and nothing travels
but the tree. A tree depends on the rows, the seed of the fit and the number of the tree. So the forest has the same
bits for any number of tasks and threads, and after a lost task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ronde._native import forest_draw, forest_grow, forest_identify
from ronde.comqueue import IterationStep
from ronde.errors import UsageError
from ronde.ml.source_data import is_sparse
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.boosting import read_rows
from ronde.ml.trees.growing import BinnedTask, tree_seed
from ronde.ml.trees.trees import NODE_KINDS, Tree, add_predictions, joined_trees, thread_count
from ronde.types import Max, Min

__all__ = ["ForestReport", "ForestRules", "ForestStep", "check_forest_rows", "first_forest_state"]

Array = NDArray[Any]

MOST_ROWS = (1 << 27) - 1  # each task has the bins of all
MOST_BINS = 256  # of a column, with that of missing values
MOST_DEPTH = 1 << 40  # of a tree without a limit
MOST_DRAWS = 16  # of a row for a tree, with 1 to spare (cpp/trees/forest.cc)
MOST_REPEATS = 64  # a weight that is a whole number up to this one stands for that many rows
WORK_OF_A_ROW = 16  # in a tree, relative to a step of a row down a tree
# Of extra trees, whose borders are drawn from the range of values: bins of equal numbers of rows are wide at both ends.
BINS_BY_RANGE = 0.5
NATIVE_NODES = ("column", "bin", "left", "missing_left", "categories", "value", "gain", "count")


@dataclass(frozen=True)
class ForestRules:
    """How a fit goes.

    Attributes:
        class_count: 0 for numbers.
        criterion: The number of `Criterion` in cpp/trees/forest.h.
        num_trees: Of the whole forest, with those of an earlier fit.
        trees_of_step: How many trees a step adds.
        max_leaves, max_depth: None: no limit.
        least_rows: Of a leaf.
        least_split: Rows of a node that is split.
        least_weight: Of a leaf, as a part of the weight of all rows.
        least_decrease: Of the impurity by a split.
        columns_of_node: How many columns are drawn for each node.
        is_extra_random: Whether each column offers one random border.
        draws: How many rows are drawn for a tree: a part of all (float), a number (int), None: each is taken once.
        has_oob: Whether trees predict the rows that they have not drawn.
        max_bins: Of a column, at most 255.
        is_categorical: By column.
        seed: Of random numbers.
    """

    class_count: int
    criterion: int
    num_trees: int
    trees_of_step: int
    max_leaves: int | None
    max_depth: int | None
    least_rows: int
    least_split: int
    least_weight: float
    least_decrease: float
    columns_of_node: int
    is_extra_random: bool
    draws: float | int | None
    has_oob: bool
    max_bins: int
    is_categorical: Array
    seed: int

    @property
    def value_count(self) -> int:
        """How many values a leaf has."""
        return max(1, self.class_count)


class ForestReport(Protocol):
    """Gets the record of each step and the state, on task 0; returns whether a callback ends the fit."""

    def __call__(self, record: Mapping[str, Any], state: Any) -> bool: ...


def first_forest_state(bins: Bins | None = None, trees: Sequence[Tree] = ()) -> dict[str, Any]:
    """Return the state before the first step; of a warm start with bins and trees of an earlier fit."""
    return {"bins": bins and bins.plain, "trees": list(trees), "oob": None}


def check_forest_rows(num_rows: int) -> None:
    """Raise UsageError if all tasks together have too many rows for a forest."""
    if num_rows > MOST_ROWS:
        raise UsageError(
            f"there are {num_rows:,} rows, and forests are grown from at most {MOST_ROWS:,}: fit to a sample of the "
            "rows, or use gradient boosting, whose tasks share the rows"
        )


@dataclass
class ForestTask:
    """What a task has, beside the state.

    Attributes:
        own: The rows of this task.
        columns: uint8, the bins of all rows, column after column.
        y: float64, of all rows.
        draws: Identities, numbers of the first equal row, how many rows each stands for, and the rate of draws.
        weights: int64, of one draw of each row.
        integers: int64, y of numbers as integers; None for classes.
        unit: What an impurity of integers is multiplied by.
        ranges: The least and the largest value of each column in each bin, float64 of shape (columns * 256,); None
            unless borders are drawn.
    """

    own: BinnedTask
    own_count: int
    columns: Array
    y: Array
    draws: tuple[Array, Array, Array, float]
    weights: Array
    integers: Array | None
    unit: float
    ranges: tuple[Array, Array] | None


class ForestStep:
    """A step of a forest.

    Args:
        rules: Those of the fit.
        report: Gets the record of each step.
    """

    def __init__(self, rules: ForestRules, report: ForestReport) -> None:
        self._rules, self._report = rules, report
        self._task: ForestTask | None = None

    def __deepcopy__(self, memo: object) -> ForestStep:
        return ForestStep(self._rules, self._report)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForestStep, (self._rules, self._report)

    def __call__(self, c: IterationStep) -> None:
        if self._task is None:
            self._task = self._begin(c)
        rules, first = self._rules, len(c.state.trees)
        numbers = range(first, min(first + rules.trees_of_step, rules.num_trees))
        grown = c.gather(self._grow(c, self._task, [n for n in numbers if n % c.num_tasks == c.task_id]))
        parts = [iter(part) for part in grown]
        c.state.trees.extend(next(parts[number % c.num_tasks]) for number in numbers)
        is_complete = len(c.state.trees) == rules.num_trees
        if is_complete and rules.has_oob:
            c.state.oob = self._oob_means(c, self._task)
        leaves = sum(int((tree["column"] < 0).sum()) for tree in c.state.trees[first:])
        record = {"step": c.step_no, "trees": len(c.state.trees), "leaves": leaves / max(1, len(numbers))}
        should_stop = c.task_id == 0 and self._report(record, c.state)
        c.stop_if(should_stop or is_complete)

    def _begin(self, c: IterationStep) -> ForestTask:
        rules = self._rules
        by_range = BINS_BY_RANGE if rules.is_extra_random else 0.0
        own, y, _ = read_rows(c, rules.max_bins, rules.is_categorical, rules.seed, by_range)
        parts = c.gather((_as_columns(own.binned, len(y), own.bins.num_columns), y, own.weights))
        columns = np.concatenate([part for part, _, _ in parts], axis=1).reshape(-1)
        all_y = np.concatenate([part for _, part, _ in parts])
        weights = None if own.weights is None else np.concatenate([part for _, _, part in parts])
        repeats, integer_weights = _integer_weights(weights, len(all_y), rules.class_count > 0)
        identities = np.empty(len(all_y), np.uint64)
        forest_identify(columns, own.bins.num_columns, identities, own.threads)
        integers: Array | None = None
        unit = 1 / math.log(2) if rules.criterion == 1 else 1.0
        if not rules.class_count:
            integers, unit = _integer_targets(all_y, repeats, integer_weights)
        draws = (
            identities,
            _first_numbers(identities, all_y, repeats),
            repeats,
            self._rate(int(repeats.sum())),
        )
        ranges = _ranges(c, own) if rules.is_extra_random else None
        return ForestTask(own, len(y), columns, all_y, draws, integer_weights, integers, unit, ranges)

    def _rate(self, units: int) -> float:
        """Return how often each row is drawn for a tree, in the mean; 0: each is taken once."""
        draws = self._rules.draws
        if draws is None:
            return 0.0
        return draws / units if isinstance(draws, int) else float(draws)

    def _grow(self, c: IterationStep, task: ForestTask, numbers: list[int]) -> list[Tree]:
        rules = self._rules
        seeds = np.array([tree_seed(rules.seed, number) for number in numbers], np.uint64)
        cores = thread_count(len(task.y) * len(numbers) * WORK_OF_A_ROW)
        grown = forest_grow(
            task.columns,
            *task.own.bins.arrays,
            *task.draws,
            task.weights,
            task.y,
            task.integers,
            rules.class_count,
            rules.criterion,
            rules.max_leaves or 0,
            MOST_DEPTH if rules.max_depth is None else rules.max_depth,
            rules.least_rows,
            rules.least_split,
            rules.least_weight,
            rules.least_decrease,
            task.unit,
            rules.columns_of_node,
            rules.is_extra_random,
            *(task.ranges or (None, None)),
            seeds,
            max(1, min(len(numbers), cores // c.tasks_here)),
        )
        return [_tree_of(arrays, rules.value_count) for arrays in grown]

    def _oob_means(self, c: IterationStep, task: ForestTask) -> Array:
        """Return the means of the predictions of trees for rows that they have not drawn; NaN: all have drawn it."""
        first, count = task.own.first_row, task.own_count
        sums, trees = np.zeros((count, self._rules.value_count)), np.zeros(count)
        drawn = np.empty(len(task.y), np.uint32)
        for number, tree in enumerate(c.state.trees):
            forest_draw(*task.draws, tree_seed(self._rules.seed, number), drawn)
            if not drawn.any():
                continue  # the tree has taken all rows
            is_out = (drawn[first : first + count] == 0) & (task.draws[2][first : first + count] > 0)
            values = np.zeros_like(sums)
            joined = joined_trees([tree], 1, self._rules.value_count)
            add_predictions(joined, task.own.bins, task.own.binned, values, task.own.threads)
            sums[is_out] += values[is_out]
            trees += is_out
        means = np.divide(sums, trees[:, None], out=np.full_like(sums, np.nan), where=trees[:, None] > 0)
        return np.concatenate(c.gather(means))


def _ranges(c: IterationStep, own: BinnedTask) -> tuple[Array, Array]:
    """Return the least and the largest value of each column in each bin, over the rows of all tasks with a weight.

    Infinite where there are none.
    """
    columns = own.bins.num_columns
    lows, highs = np.full((columns, MOST_BINS), np.inf), np.full((columns, MOST_BINS), -np.inf)
    binned, at = _as_columns(own.binned, len(c.row_range), columns), 0
    for X in _dense_parts(c):
        rows = np.arange(at, at + len(X))
        is_used = np.ones(len(X), bool) if own.weights is None else own.weights[rows] > 0
        for column in np.flatnonzero(~own.bins.is_categorical.astype(bool)).tolist():
            values, places = X[is_used, column].astype(np.float64), binned[column, rows[is_used]]
            np.fmin.at(lows[column], places, values)
            np.fmax.at(highs[column], places, values)
        at += len(X)
    c.reduce_in_place(lows, Min)
    c.reduce_in_place(highs, Max)
    return lows.reshape(-1), highs.reshape(-1)


def _dense_parts(c: IterationStep) -> Iterator[Array]:
    """Yield the rows of this task in their order, of sparse ones some at a time."""
    for X in (block.X for block in c.blocks) if c.is_streamed or is_sparse(c.data.X) else [c.data.X]:
        yield X.toarray() if is_sparse(X) else X


def _as_columns(binned: Array, num_rows: int, num_columns: int) -> Array:
    """Return bins column after column, shape (columns, rows). `binned`: as of `Bins.of`."""
    groups = -(-num_columns // 16)
    width = -(-num_columns // groups)
    columns = binned.reshape(groups, num_rows, width).transpose(0, 2, 1)
    return np.ascontiguousarray(columns).reshape(groups * width, num_rows)[:num_columns]


def _tree_of(arrays: tuple[bytes, ...], value_count: int) -> Tree:
    widths = {"categories": (-1, 4), "value": (-1, value_count)}
    return {
        name: np.frombuffer(array, NODE_KINDS[name]).reshape(widths.get(name, (-1,)))
        for name, array in zip(NATIVE_NODES, arrays)
    }


def _first_numbers(identities: Array, y: Array, repeats: Array) -> Array:
    """Return for each row how many with its identity come before it, uint32, each with its repeats: by y, then by row.

    So the order of the rows and the unit of y have no effect on what is drawn.
    """
    order = np.lexsort((y, identities))
    ordered, counts = identities[order], repeats[order].astype(np.int64)
    before = np.cumsum(counts) - counts
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    firsts = np.empty(len(order), np.uint32)
    firsts[order] = before - before[is_first][np.cumsum(is_first) - 1]
    return firsts


def _integer_weights(weights: Array | None, num_rows: int, are_classes: bool) -> tuple[Array, Array]:
    """Return for how many equal rows each row stands, uint32, and the weight of one of them, int64."""
    if weights is None:
        return np.ones(num_rows, np.uint32), np.ones(num_rows, np.int64)
    is_whole = (weights == np.rint(weights)).all() and weights.max() <= MOST_REPEATS
    if is_whole and weights.sum() < 1 << 30:
        return weights.astype(np.uint32), np.ones(num_rows, np.int64)
    count_bits = num_rows.bit_length()
    bits = 62 - count_bits if are_classes else min(62 - count_bits, max(34, count_bits + 8))
    exponent = bits - 1 - math.frexp(MOST_DRAWS * math.fsum(weights))[1]
    integers = np.maximum(1, np.rint(np.ldexp(weights, exponent))).astype(np.int64)
    return (weights > 0).astype(np.uint32), integers


def _integer_targets(y: Array, repeats: Array, weights: Array) -> tuple[Array, float]:
    """Return targets as integers, whose sums do not overflow, and the square of one unit of theirs."""
    used = y[repeats > 0]
    center, half = used.max() / 2 + used.min() / 2, used.max() / 2 - used.min() / 2
    total = MOST_DRAWS * int(np.sum(repeats * weights))
    most_bits = min(52, 61 - total.bit_length())
    exponent = most_bits - math.frexp(half)[1] if half > 0 else 0
    numbers = np.where(repeats > 0, y, center) - center
    return np.rint(np.ldexp(numbers, exponent)).astype(np.int64), math.ldexp(
        1.0, max(-1000, min(1000, -2 * exponent))
    )
