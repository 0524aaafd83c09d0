"""Growth of a tree by all tasks, from the gradients of their rows: rules, and the native calls around a tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde._native import (
    tree_add_values,
    tree_count_bytes,
    tree_grow,
    tree_largest_integers,
    tree_pack,
    tree_sum_leaves,
)
from ronde.comqueue import IterationStep
from ronde.errors import UsageError
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.trees import Tree
from ronde.types import Max

__all__ = [
    "MOST_ROWS",
    "GrownTree",
    "BinnedTask",
    "TreeRules",
    "check_row_count",
    "grow_tree",
    "leaf_quantiles",
    "tree_seed",
]

Array = NDArray[Any]

MOST_DEPTH = 1 << 20  # of a tree without a limit
MOST_ROWS = (1 << 30) - 1  # of all tasks: with more, the integer of a hessian would be 0 or 1
LEAST_GRADIENT = 1e-280  # smaller ones count as 0: their scale would be infinite


@dataclass(frozen=True)
class TreeRules:
    """How a tree grows: see `cpp/trees/growing.h`.

    Attributes:
        max_leaves: At least 2; None: no limit.
        max_depth: None: no limit.
        least_rows: Of a leaf.
        least_hessian: Of a leaf.
        least_gain: A split needs more.
        l1, l2: Penalties on the values of leaves.
        column_fraction: How many of the columns are drawn for each node.
        is_extra_random: Whether each column offers one random border.
        monotone: int8, the sign of the slope of each column; None: any.
        interactions: Which columns may be on one path together: where each group of columns begins and the last one
            ends, int64, and the columns, int32, ascending in each group. None: all.
    """

    max_leaves: int | None = 31
    max_depth: int | None = None
    least_rows: int = 20
    least_hessian: float = 1e-3
    least_gain: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    column_fraction: float = 1.0
    is_extra_random: bool = False
    monotone: Array | None = None
    interactions: tuple[Array, Array] | None = None

    def most_leaves(self, num_rows: int) -> int:
        """Return how many leaves a tree of so many rows can have, at least 2."""
        most = max(2, num_rows // max(1, self.least_rows))
        if self.max_depth is not None:
            most = min(most, 1 << min(self.max_depth, 40))
        return max(2, most if self.max_leaves is None else min(most, self.max_leaves))


@dataclass(frozen=True)
class BinnedTask:
    """The rows of one task.

    Attributes:
        binned: As of `Bins.of`.
        weights: float64; None: 1 each.
        first_row: The number of the first one among those of all tasks.
        num_rows: The number of rows of all tasks.
        threads: How many threads work on them.
    """

    bins: Bins
    binned: Array
    weights: Array | None
    first_row: int
    num_rows: int
    threads: int


@dataclass(frozen=True)
class GrownTree:
    """A tree without values, and the rows of its leaves on this task.

    Attributes:
        nodes: The tree; the array "value" is still missing.
        leaves: The numbers of the nodes that are leaves.
        bounds: Between which their values have to be, shape (leaves, 2).
        permutation: The rows, those of a leaf next to each other.
        places: From which to which place of the permutation a leaf has its rows, shape (leaves, 2).
        integers: 0 for a row that does not count.
    """

    nodes: Tree
    leaves: Array
    bounds: Array
    permutation: Array
    places: Array
    integers: Array

    @property
    def leaf_rows(self) -> tuple[Array, Array, Array]:
        """The rows of the leaves, in the order of the native functions."""
        return self.permutation, self.places, self.integers

    def with_values(self, values: Array) -> Tree:
        """Return the tree. `values`: of the leaves, shape (leaves,) or (leaves, values)."""
        table = np.zeros((len(self.nodes["column"]), *values.reshape(len(values), -1).shape[1:]))
        table[self.leaves] = values.reshape(len(values), -1)
        return {**self.nodes, "value": table}

    def add_to(self, scores: Array, column: int, values: Array, threads: int) -> None:
        """Add the values of the leaves to a column of the scores of all rows of this task."""
        tree_add_values(*self.leaf_rows, values, scores, column, threads)


def tree_seed(seed: int, number: int) -> int:
    """Return the seed of a tree."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


def check_row_count(num_rows: int) -> None:
    """Raise UsageError if all tasks together have too many rows for a tree."""
    if num_rows > MOST_ROWS:
        raise UsageError(
            f"there are {num_rows:,} rows, and trees are grown from at most {MOST_ROWS:,}: fit to a sample of the rows"
        )


def grow_tree(
    c: IterationStep,
    rows: BinnedTask,
    rules: TreeRules,
    gradients: Array,
    hessians: Array,
    column: int,
    is_out: Array | None,
    seed: int,
) -> GrownTree:
    """Grow a tree from one column of the gradients and hessians, by all tasks.

    `is_out`: uint8, 1 for a row that does not count (None: all count). Raises FloatingPointError if a derivative is not
    finite, UsageError if there are too many rows, PeerLostError and MismatchError.
    """
    check_row_count(rows.num_rows)
    integers, scales = _packed(c, rows, gradients, hessians, column, is_out, seed)
    most_leaves, columns = rules.most_leaves(rows.num_rows), rows.bins.num_columns
    nodes, bounds, places = _empty_nodes(2 * most_leaves - 1)
    permutation = np.empty(len(gradients), np.uint32)
    count = tree_grow(
        rows.binned,
        *rows.bins.arrays,
        integers,
        *scales,
        rows.num_rows,
        most_leaves,
        MOST_DEPTH if rules.max_depth is None else rules.max_depth,
        rules.least_rows,
        rules.least_hessian,
        rules.least_gain,
        rules.l1,
        rules.l2,
        max(1, min(columns, round(rules.column_fraction * columns))),
        rules.is_extra_random,
        seed,
        rules.monotone,
        *(rules.interactions or (None, None)),
        c.reduce_in_place if c.num_tasks > 1 else None,
        *nodes.values(),
        bounds,
        places,
        permutation,
        rows.threads,
    )
    nodes = {name: array[:count].copy() for name, array in nodes.items()}
    leaves = np.flatnonzero(nodes["column"] < 0)
    return GrownTree(nodes, leaves, bounds[leaves], permutation, places[leaves], integers)


def _packed(
    c: IterationStep,
    rows: BinnedTask,
    gradients: Array,
    hessians: Array,
    column: int,
    is_out: Array | None,
    seed: int,
) -> tuple[Array, list[float]]:
    """Return the integers of the rows, and the scales of gradients and hessians in them."""
    most = largest(c, gradients[:, column], hessians[:, column])
    scales = [
        (integer - 1) / number if number > LEAST_GRADIENT else 1.0
        for integer, number in zip(tree_largest_integers(rows.num_rows), most)
    ]
    integers = np.empty(len(gradients), np.int64)
    place = (seed, rows.first_row, rows.num_rows)
    tree_pack(gradients, hessians, rows.weights, is_out, column, *scales, *place, integers, rows.threads)
    return integers, scales


def _empty_nodes(room: int) -> tuple[Tree, Array, Array]:
    """Return arrays for nodes in the order of `tree_grow`, for bounds of their values, and for places of their rows."""
    nodes: Tree = {
        "column": np.empty(room, np.int32),
        "bin": np.empty(room, np.int32),
        "left": np.empty(room, np.int32),
        "missing_left": np.empty(room, np.uint8),
        "categories": np.empty((room, 4), np.uint64),
        "gain": np.empty(room),
        "count": np.empty(room, np.int64),
    }
    return nodes, np.empty((room, 2)), np.empty((room, 2), np.int64)


def largest(c: IterationStep, gradients: Array, hessians: Array) -> tuple[float, float]:
    """Return the largest absolute gradient and the largest hessian of all tasks. Raises FloatingPointError."""
    most = np.zeros(2)
    if len(gradients):
        most[:] = max(gradients.max(), -gradients.min()), hessians.max()
    most[np.isnan(most)] = np.inf
    c.reduce_in_place(most, Max)
    if not np.isfinite(most).all():
        raise FloatingPointError("the derivatives of the loss are not finite")
    return float(most[0]), float(most[1])


def leaf_sums(
    c: IterationStep, rows: BinnedTask, tree: GrownTree, gradients: Array, hessians: Array, column: int
) -> Array:
    """Return the sums of gradients and hessians of each leaf over the rows of all tasks that count, (leaves, 2).

    Each summand is rounded to 61 bits of the largest one, less the bits of the number of rows: 38 with 8 million rows.
    """
    most = largest(c, gradients[:, column], hessians[:, column])
    # A power of two, so that only the last bits are lost.
    bits = 61 - int(rows.num_rows).bit_length()
    scales = [2.0 ** min(1000, bits - math.frexp(max(number, 1e-290))[1]) for number in most]
    sums = np.empty((len(tree.leaves), 2), np.int64)
    tree_sum_leaves(*tree.leaf_rows, gradients, hessians, column, *scales, sums, rows.threads)
    c.reduce_in_place(sums)
    return np.asarray(sums / scales)


def newton_values(sums: Array, rules: TreeRules, bounds: Array) -> Array:
    """Return the values of leaves that lower the loss most, within bounds. `sums`: as of `leaf_sums`."""
    gradients, curvatures = sums[:, 0], sums[:, 1] + rules.l2
    slopes = np.copysign(np.maximum(np.abs(gradients) - rules.l1, 0), gradients)
    values = np.divide(-slopes, curvatures, out=np.zeros(len(sums)), where=curvatures > 0)
    return np.asarray(np.clip(values, bounds[:, 0], bounds[:, 1]))


def leaf_quantiles(
    c: IterationStep,
    rows: BinnedTask,
    tree: GrownTree,
    y: Array,
    scores: Array,
    weights: Array | None,
    quantile: float,
) -> Array:
    """Return a quantile of y - score in each leaf, over the rows of all tasks that count; 0 of none.

    It lies in the middle of the two nearest numbers if it falls between them. `weights`: int64; None: 1 each.
    """
    counts = _byte_counts(c, rows, tree, y, scores, weights, np.zeros(len(tree.leaves), np.uint64), 56)
    targets = quantile * counts.sum(axis=1)
    lower = _search(c, rows, tree, y, scores, weights, counts, np.ceil(targets).astype(np.int64))
    upper = _search(c, rows, tree, y, scores, weights, counts, np.floor(targets).astype(np.int64) + 1)
    found = lower / 2 + upper / 2
    return np.asarray(np.where(counts.any(axis=1), found, 0.0))


def _search(
    c: IterationStep,
    rows: BinnedTask,
    tree: GrownTree,
    y: Array,
    scores: Array,
    weights: Array | None,
    counts: Array,
    ranks: Array,
) -> Array:
    """Return the number of each leaf at which the weights up to it, in order, reach a rank from 1."""
    ranks = np.clip(ranks, 1, np.maximum(1, counts.sum(axis=1)))
    prefixes = np.zeros(len(ranks), np.uint64)
    for shift in range(56, -8, -8):
        if shift < 56:
            counts = _byte_counts(c, rows, tree, y, scores, weights, prefixes, shift)
        reached = np.cumsum(counts, axis=1)
        byte = (reached >= ranks[:, None]).argmax(axis=1)
        ranks = ranks - (reached - counts)[np.arange(len(ranks)), byte]
        prefixes = prefixes << np.uint64(8) | byte.astype(np.uint64)
    top = np.uint64(1 << 63)
    bits = np.where(prefixes & top, prefixes ^ top, ~prefixes)
    return bits.view(np.float64)


def _byte_counts(
    c: IterationStep,
    rows: BinnedTask,
    tree: GrownTree,
    y: Array,
    scores: Array,
    weights: Array | None,
    prefixes: Array,
    shift: int,
) -> Array:
    counts = np.zeros((len(prefixes), 256), np.int64)
    tree_count_bytes(*tree.leaf_rows, y, scores, weights, prefixes, shift, counts, rows.threads)
    c.reduce_in_place(counts)
    return counts
