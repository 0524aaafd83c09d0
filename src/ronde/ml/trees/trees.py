"""Trees as arrays: those of a model one after the other, and what they predict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde._native import tree_add_shap_values, tree_find_leaves, tree_predict
from ronde.errors import UsageError
from ronde.ml.fitted_forms import Sizes
from ronde.ml.trees.bins import Bins, arrays_problem

__all__ = [
    "Tree",
    "TreesForm",
    "add_predictions",
    "add_shap_values",
    "find_leaves",
    "joined_trees",
    "some_trees",
    "thread_count",
]

Array = NDArray[Any]
Tree = dict[str, Array]  # a name for each of NODE_KINDS; without its children a node is a leaf

# dtypes of the arrays of nodes: the column of a split, -1 of a leaf; the bin up to which rows go left; the left child,
# which comes before the right one; whether missing values go left; the categories that go left; the values of a leaf;
# what the split gains; how many rows there are
NODE_KINDS = {
    "column": "int32",
    "bin": "int32",
    "left": "int32",
    "missing_left": "uint8",
    "categories": "uint64",
    "value": "float64",
    "gain": "float64",
    "count": "int64",
}
# and of a model: where its trees begin and the last one ends; to which score each adds
KINDS = {**NODE_KINDS, "roots": "int64", "scores": "int32"}
FOR_NATIVE = ("column", "bin", "left", "missing_left", "categories", "value", "roots", "scores")
WORK_OF_A_THREAD = 1 << 16  # steps of rows down a tree


@dataclass(frozen=True)
class TreesForm:
    """The form of the trees of a model in a file. `scores`: the name of the axes with a number for each score."""

    scores: str
    is_needed: bool = True

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        if problem := arrays_problem(value, KINDS, ("categories", "value")):
            return problem
        if len({len(value[name]) for name in NODE_KINDS}) > 1 or value["categories"].shape[1] != 4:
            return "has different numbers of nodes"
        if len(value["roots"]) != len(value["scores"]) + 1:
            return "has different numbers of trees"
        return _nodes_problem(value, sizes["features"], sizes[self.scores])


def _nodes_problem(trees: dict[str, Array], features: int, scores: int) -> str | None:
    """Return what is wrong with the nodes, None: nothing. Native code checks them before it predicts, even no rows."""
    no_bins = Bins(np.empty(0), np.zeros(features + 1, np.int64), np.zeros(features, np.uint8))
    try:
        add_predictions(trees, no_bins, np.empty(0, np.uint8), np.empty((0, scores)))
    except UsageError as error:
        return f"cannot be used: {error}"
    return None


def joined_trees(trees: Sequence[Tree], score_count: int, value_count: int = 1) -> dict[str, Array]:
    """Return the trees of a model. The first one adds to score 0, the next one to score 1, and so on, in turn."""
    shapes = {"categories": (0, 4), "value": (0, value_count)}
    joined = {
        name: np.concatenate([np.empty(shapes.get(name, 0), kind), *(tree[name] for tree in trees)])
        for name, kind in NODE_KINDS.items()
    }
    joined["roots"] = np.cumsum([0, *(len(tree["column"]) for tree in trees)], dtype=np.int64)
    joined["scores"] = (np.arange(len(trees)) % score_count).astype(np.int32)
    return joined


def some_trees(trees: dict[str, Array], begin: int, end: int) -> dict[str, Array]:
    """Return some consecutive trees of a model."""
    first, last = trees["roots"][begin], trees["roots"][end]
    some = {name: trees[name][first:last] for name in NODE_KINDS}
    some["roots"], some["scores"] = trees["roots"][begin : end + 1] - first, trees["scores"][begin:end]
    return some


def split_trees(trees: dict[str, Array]) -> list[Tree]:
    """Return the trees of a model one by one."""
    count = len(trees["scores"])
    return [
        {name: part[name] for name in NODE_KINDS}
        for part in (some_trees(trees, each, each + 1) for each in range(count))
    ]


def add_predictions(
    trees: dict[str, Array], bins: Bins, binned: Array, scores: Array, threads: int = 1
) -> None:
    """Add the values of all trees to scores, float64 of shape (rows, scores), in the order of trees."""
    tree_predict(*(trees[name] for name in FOR_NATIVE), binned, *bins.arrays, scores, threads)


def add_shap_values(
    trees: dict[str, Array], bins: Bins, binned: Array, contributions: Array, threads: int = 1
) -> None:
    """Add how much each column adds to each score, and the means of the trees behind: see cpp/trees/shap.h.

    `contributions`: float64 of shape (rows, scores, columns + 1).
    """
    flat, scores = contributions.reshape(len(contributions), -1), contributions.shape[1]
    arrays = (*(trees[name] for name in FOR_NATIVE), trees["count"])
    tree_add_shap_values(*arrays, binned, *bins.arrays, flat, scores, threads)


def find_leaves(trees: dict[str, Array], bins: Bins, binned: Array, num_rows: int, threads: int = 1) -> Array:
    """Return the number of the leaf of each row in each tree, int32 of shape (rows, trees)."""
    leaves = np.empty((num_rows, len(trees["scores"])), np.int32)
    tree_find_leaves(*(trees[name] for name in FOR_NATIVE), binned, *bins.arrays, leaves, threads)
    return leaves


def thread_count(work: int, most: int | None = None) -> int:
    """Return how many threads pay. `work`: numbers that are read, or steps down trees; `most`: None, all cores."""
    cores = len(os.sched_getaffinity(0)) if most is None else most
    return max(1, min(cores, work // WORK_OF_A_THREAD))
