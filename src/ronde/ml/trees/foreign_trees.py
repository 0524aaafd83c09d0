"""Trees of other libraries as trees of Ronde: nodes in another order, and borders as numbers of bins.

Files may be from a stranger: nodes are visited once, and arrays have the forms that native code checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.trees.bins import MOST_CATEGORIES, Bins
from ronde.ml.trees.trees import KINDS, Tree, joined_trees

__all__ = ["ForeignModel", "ForeignNode", "categories_left", "whole_categories"]

Array = NDArray[Any]
MOST_BORDERS = 254  # of a column, so that a bin is one byte
MOST_COLUMNS = 1 << 24  # a small file may claim any number of them
LARGEST_CATEGORY = 1 << 24  # the numbers below are exact in float32, and a set of them takes at most 2 MiB


@dataclass
class ForeignNode:
    """A node; number 0 of a tree is the root.

    Attributes:
        column: That of the split, -1 of a leaf.
        border: Rows of numbers up to it go left.
        left, right: The numbers of the children.
        missing_left: Whether missing values and unknown categories go left.
        categories: Those that go left; None of a split of numbers.
        value: Of a leaf.
        gain: Of a split.
        count: The rows of the node, or a number in proportion to their weights.
    """

    column: int = -1
    border: float = np.inf
    left: int = 0
    right: int = 0
    missing_left: bool = False
    categories: frozenset[int] | None = None
    value: float = 0.0
    gain: float = 0.0
    count: int = 1


@dataclass
class ForeignModel:
    """A model of another library.

    Attributes:
        library: Its name, for errors.
        trees: In turn for each score.
        baseline: The scores before the first tree.
        names: Of the columns; None: they have none.
        is_categorical: By column.
        params: Those of the estimator.
        classes: How many; 0: it predicts numbers.
        categories: Names of categories by the names of columns.
        knows_all: Whether categories that no split names are known, too, rather than missing values.
    """

    library: str
    trees: list[list[ForeignNode]]
    baseline: Array
    names: list[str] | None
    is_categorical: Array
    params: dict[str, Any]
    classes: int = 0
    categories: dict[str, Array] = field(default_factory=dict)
    knows_all: bool = False

    def __post_init__(self) -> None:
        if self.params["loss"] == "softmax" and len(self.baseline) == 2:
            self._take_differences()

    def _take_differences(self) -> None:
        """Make one score of those of two classes: the softmax of two is the logistic function of their difference."""
        for tree in self.trees[::2]:
            for node in tree:
                node.value = -node.value
        self.baseline = self.baseline[1:] - self.baseline[:1]
        self.params = {**self.params, "loss": "logistic"}

    @property
    def attributes(self) -> dict[str, Any]:
        """The fitted attributes of an estimator. Raises UsageError if Ronde's trees cannot express the model."""
        bins = self._bins()
        trees = joined_trees([_tree(tree, bins) for tree in self.trees], len(self.baseline))
        return {
            "bins_": bins.plain,
            "trees_": {name: np.ascontiguousarray(trees[name]) for name in KINDS},
            "baseline_": np.asarray(self.baseline, np.float64),
            "n_features_in_": bins.num_columns,
            "n_iter_": len(self.trees) // len(self.baseline),
            "seed_": 0,
            **({"feature_names_in_": np.array(self.names, dtype=object)} if self.names else {}),
            **({"classes_": np.arange(self.classes)} if self.classes else {}),
            **({"categories_": self.categories} if self.categories else {}),
        }

    def _bins(self) -> Bins:
        found: list[set[float]] = [set() for _ in self.is_categorical]
        for node in (node for tree in self.trees for node in tree if node.column >= 0):
            if node.column >= len(found):
                raise UsageError(f"a split uses column {node.column} of {len(found)}")
            if np.isnan(node.border):
                raise UsageError(f"a split of column {node.column} has no border")
            if node.categories and min(node.categories) < 0:
                raise UsageError(f"a split of column {node.column} has categories below 0")
            if (node.categories is not None) != bool(self.is_categorical[node.column]):
                raise UsageError(f"column {node.column} has numbers in one split and categories in another")
            if node.categories is not None:
                found[node.column] |= node.categories
            elif node.border < np.inf:
                found[node.column].add(node.border)
        names = list(self.categories)
        for column in np.flatnonzero(self.is_categorical).tolist():
            if self.names and self.names[column] in names:
                found[column] |= set(range(len(self.categories[self.names[column]])))
            elif self.knows_all and max(found[column], default=0) < MOST_CATEGORIES:
                found[column] = set(range(MOST_CATEGORIES))
        for column, numbers in enumerate(found):
            self._check_count(column, len(numbers))
        values = [np.array(sorted(each), np.float64) for each in found]
        starts = np.cumsum([0, *map(len, values)], dtype=np.int64)
        return Bins(
            np.concatenate([np.empty(0), *values]), starts, np.asarray(self.is_categorical).astype(np.uint8)
        )

    def _check_count(self, column: int, count: int) -> None:
        if count > MOST_BORDERS:
            kind = "categories" if self.is_categorical[column] else "borders between numbers"
            name = f" ({self.names[column]})" if self.names else ""
            raise UsageError(
                f"column {column}{name} has {count} {kind}, and in Ronde a column has at most {MOST_BORDERS}: train "
                f"the model with max_bin={MOST_BORDERS}"
                f"{' and tree_method=' + repr('hist') if self.library == 'XGBoost' else ''}, or with fewer trees"
            )


def _tree(tree: list[ForeignNode], bins: Bins) -> Tree:
    ordered, lefts = _in_order(tree)
    nodes: Tree = {
        "column": np.array([node.column for node in ordered], np.int32),
        "bin": np.zeros(len(ordered), np.int32),
        "left": np.array(lefts, np.int32),
        "missing_left": np.array([node.missing_left for node in ordered], np.uint8),
        "categories": np.zeros((len(ordered), 4), np.uint64),
        "value": np.array([[node.value] for node in ordered], np.float64),
        "gain": np.array([node.gain for node in ordered], np.float64),
        "count": np.array([node.count for node in ordered], np.int64),
    }
    for place, node in enumerate(ordered):
        if node.column < 0:
            continue
        values = bins.values[bins.starts[node.column] : bins.starts[node.column + 1]]
        if node.categories is None:
            nodes["bin"][place] = np.searchsorted(values, node.border)
            continue
        for number in np.searchsorted(values, sorted(node.categories)).tolist():
            nodes["categories"][place, number // 64] |= np.uint64(1 << (number % 64))
    if not (np.isfinite(nodes["value"]).all() and (nodes["count"] >= 0).all()):
        raise UsageError("a leaf has a value that is not finite, or a node a negative number of rows")
    return nodes


def _in_order(tree: list[ForeignNode]) -> tuple[list[ForeignNode], list[int]]:
    """Return the nodes, children next to each other behind their parents, and the places of left children."""
    ordered, lefts = tree[:1], []
    for node in ordered:  # which grows
        if node.column < 0:
            lefts.append(-1)
            continue
        if not (0 <= node.left < len(tree) and 0 <= node.right < len(tree)):
            raise UsageError("a node has a child that does not exist")
        lefts.append(len(ordered))
        ordered += [tree[node.left], tree[node.right]]
        if len(ordered) > len(tree):
            raise UsageError("its nodes are not those of a tree")
    return ordered, lefts


def whole_categories(bins: Bins, column: int) -> list[int]:
    """Return the categories of a column. Raises UsageError unless they are whole numbers below 2**24."""
    values = bins.values[bins.starts[column] : bins.starts[column + 1]]
    if (values != np.floor(values)).any() or (values >= LARGEST_CATEGORY).any():
        raise UsageError(
            f"column {column} has categories that are not whole numbers below {LARGEST_CATEGORY:,}, which other "
            "libraries cannot have: give the categories other numbers, and fit again"
        )
    return [int(value) for value in values]


def categories_left(tree: Tree, node: int, known: Sequence[int]) -> list[int]:
    """Return which of the known categories of a column go left at a node."""
    bits: Mapping[int, int] = dict(enumerate(tree["categories"][node].tolist()))
    return [category for number, category in enumerate(known) if bits[number // 64] >> (number % 64) & 1]
