"""Models as LightGBM's text files.

Borders and leaves are float64 in both, so predictions have the same bits, up to the order of sums. LightGBM sends
missing and unknown categories right; a node that sends them left changes its sides.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.foreign_trees import ForeignModel, ForeignNode, categories_left, whole_categories
from ronde.ml.trees.trees import Tree, split_trees

__all__ = ["lightgbm_model", "read_lightgbm"]

Array = NDArray[Any]
Lines = dict[str, str]

CATEGORY, DEFAULT_LEFT, MISSING_ZERO, MISSING_NAN = 1, 2, 1 << 2, 2 << 2  # bits of a node's decision
MISSING = MISSING_ZERO | MISSING_NAN
OBJECTIVES = {
    "squared_error": "regression",
    "absolute_error": "regression_l1",
    "quantile": "quantile alpha:{quantile}",
    "huber": "huber",
    "poisson": "poisson",
    "gamma": "gamma",
    "tweedie": "tweedie",
    "logistic": "binary sigmoid:1",
    "softmax": "multiclass num_class:{scores}",
    "ranking": "lambdarank",
    "own": "custom",
}
LOSSES = {
    "regression": "squared_error",
    "regression_l1": "absolute_error",
    "quantile": "quantile",
    "huber": "huber",
    "poisson": "poisson",
    "gamma": "gamma",
    "tweedie": "tweedie",
    "lambdarank": "ranking",
    "rank_xendcg": "ranking",
    # whose predictions are the sums of trees, too
    "fair": "squared_error",
    "mape": "squared_error",
    "custom": "squared_error",
    "": "squared_error",
}


def lightgbm_model(
    trees: dict[str, Array],
    bins: Bins,
    baseline: Array,
    loss: str,
    params: Mapping[str, Any],
    names: list[str] | None,
    categories: Mapping[str, Array],
) -> str:
    """Return a model as text that LightGBM 3 or later reads.

    `baseline`: the first scores, which become part of the first trees; `params`: the quantile of a loss. Raises
    UsageError if categories are not whole numbers.
    """
    single, scores = split_trees(trees), len(baseline)
    for number in range(min(scores, len(single))):
        leaves = single[number]["column"] < 0
        single[number]["value"] = single[number]["value"] + baseline[number] * leaves[:, None]
    known = {
        column: whole_categories(bins, column) for column in np.flatnonzero(bins.is_categorical).tolist()
    }
    texts = [f"Tree={number}\n{_tree(tree, bins, known)}\n\n" for number, tree in enumerate(single)]
    columns = names or [""] * bins.num_columns
    words = ["_".join(name.split()) or f"Column_{column}" for column, name in enumerate(columns)]
    lists = [categories[columns[column]].tolist() for column in known if columns[column] in categories]
    header = {
        "version": "v4",
        "num_class": scores,
        "num_tree_per_iteration": scores,
        "label_index": 0,
        "max_feature_idx": bins.num_columns - 1,
        "objective": OBJECTIVES[loss].format(scores=scores, **params),
        "feature_names": " ".join(words),
        "feature_infos": " ".join(_info(bins, column, known) for column in range(bins.num_columns)),
        "tree_sizes": " ".join(str(len(text.encode())) for text in texts),
    }
    lines = "".join(f"{name}={value}\n" for name, value in header.items())
    end = "end of trees\n\nfeature_importances:\n\nparameters:\nend of parameters\n\n"
    return (
        f"tree\n{lines}\n{''.join(texts)}{end}pandas_categorical:{json.dumps(lists) if lists else 'null'}\n"
    )


def _info(bins: Bins, column: int, known: Mapping[int, list[int]]) -> str:
    """Return the range of a column, as far as it is known."""
    values = bins.values[bins.starts[column] : bins.starts[column + 1]]
    if column in known:
        return ":".join(map(str, known[column])) or "none"
    return f"[{float(values[0])!r}:{float(values[-1])!r}]" if len(values) else "none"


def _tree(tree: Tree, bins: Bins, known: Mapping[int, list[int]]) -> str:
    is_leaf = tree["column"] < 0
    leaves, splits = np.flatnonzero(is_leaf).tolist(), np.flatnonzero(~is_leaf).tolist()
    places = {node: -place - 1 for place, node in enumerate(leaves)} | {
        node: place for place, node in enumerate(splits)
    }
    lists: dict[str, list[Any]] = {
        name: [] for name in ("threshold", "decision_type", "left_child", "right_child")
    }
    sets: list[list[int]] = []
    for node in splits:
        column, left = int(tree["column"][node]), int(tree["left"][node])
        children = [places[left], places[left + 1]]
        if column in known:
            going = set(categories_left(tree, node, known[column]))
            if tree["missing_left"][node]:
                going, children = set(known[column]) - going, children[::-1]
            lists["threshold"].append(len(sets))
            lists["decision_type"].append(CATEGORY | MISSING_NAN)
            sets.append(_words(going))
        else:
            lists["threshold"].append(bins.border(column, int(tree["bin"][node])))
            lists["decision_type"].append(MISSING_NAN | (DEFAULT_LEFT if tree["missing_left"][node] else 0))
        lists["left_child"].append(children[0])
        lists["right_child"].append(children[1])
    finite_gain = np.minimum(tree["gain"], np.finfo(np.float32).max)
    lines = {
        "num_leaves": [len(leaves)],
        "num_cat": [len(sets)],
        "split_feature": tree["column"][splits].tolist(),
        "split_gain": finite_gain[splits].tolist(),
        **lists,
        "leaf_value": tree["value"][leaves, 0].tolist(),
        "leaf_weight": tree["count"][leaves].tolist(),
        "leaf_count": tree["count"][leaves].tolist(),
        "internal_value": [0] * len(splits),
        "internal_weight": tree["count"][splits].tolist(),
        "internal_count": tree["count"][splits].tolist(),
    }
    if sets:
        lines["cat_boundaries"] = np.cumsum([0, *map(len, sets)]).tolist()
        lines["cat_threshold"] = [word for words in sets for word in words]
    text = "".join(f"{name}={' '.join(map(repr, values))}\n" for name, values in lines.items())
    return f"{text}is_linear=0\nshrinkage=1\n"


def _words(categories: set[int]) -> list[int]:
    """Return a set of numbers as bits of words of 32 bits."""
    words = [0] * (max(categories, default=0) // 32 + 1)
    for category in categories:
        words[category // 32] |= 1 << (category % 32)
    return words


def read_lightgbm(path: str | os.PathLike[str]) -> ForeignModel:
    """Return the model that LightGBM wrote to a text file. Raises UsageError, OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        return _model(text)
    except UsageError as error:
        raise UsageError(f"{os.fspath(path)} cannot be read as a model of LightGBM: {error}") from None
    except (KeyError, ValueError, IndexError, TypeError, ArithmeticError) as error:
        raise UsageError(
            f"{os.fspath(path)} is not a model of LightGBM in text, or is damaged ({type(error).__name__}: {error}): "
            "write it with booster.save_model(path)"
        ) from None


def _model(text: str) -> ForeignModel:
    header_text, *tree_texts = text.split("end of trees")[0].split("\nTree=")
    if not header_text.startswith("tree"):
        raise UsageError("it does not begin with 'tree'")
    header = _lines(header_text)
    scores, names = int(header["num_tree_per_iteration"]), header["feature_names"].split(" ")
    loss, params, factor = _loss(header.get("objective", ""), scores)
    if "average_output" in header_text.split("\n"):
        factor /= max(1, len(tree_texts) // scores)
    if len(names) != int(header["max_feature_idx"]) + 1 or not tree_texts or len(tree_texts) % scores:
        raise UsageError("it has an impossible number of columns or trees")
    infos = header.get("feature_infos", "").split(" ")
    is_categorical = np.array([":" in info and not info.startswith("[") for info in infos])
    trees = [_foreign_tree(_lines(each), factor) for each in tree_texts]
    is_categorical = is_categorical if len(is_categorical) == len(names) else np.zeros(len(names), bool)
    for tree in trees:
        for node in tree:
            if node.categories is not None:
                is_categorical[node.column] = True
    are_default = names == [f"Column_{column}" for column in range(len(names))]
    return ForeignModel(
        "LightGBM",
        trees,
        np.zeros(scores),
        None if are_default else names,
        is_categorical,
        {"loss": loss, **params},
        classes={"logistic": 2, "softmax": scores}.get(loss, 0),
        categories=_categories(text, names, is_categorical),
    )


def _lines(text: str) -> Lines:
    return dict(line.split("=", 1) for line in text.split("\n") if "=" in line)


def _loss(objective: str, scores: int) -> tuple[str, dict[str, Any], float]:
    """Return the loss, other parameters, and the factor of leaves."""
    name, *words = objective.split(" ")
    options = dict(word.split(":", 1) for word in words if ":" in word)
    if name == "binary":
        return "logistic", {}, float(options.get("sigmoid", 1))
    if name == "multiclass":
        return "softmax", {}, 1.0
    if name not in LOSSES or scores != 1 or "sqrt" in words:
        raise UsageError(
            f"its objective is {objective!r}, whose predictions Ronde cannot compute: expected one of binary, "
            f"multiclass, {', '.join(filter(None, LOSSES))}"
        )
    params = {"quantile": float(options.get("alpha", 0.5))} if name == "quantile" else {}
    return LOSSES[name], params, 1.0


def _categories(text: str, names: list[str], is_categorical: Array) -> dict[str, Array]:
    """Return the names of categories of a model that was fitted to a data frame."""
    line = text.rpartition("pandas_categorical:")[2].split("\n")[0].strip()
    lists = json.loads(line) if line.startswith("[") else []
    if not lists:
        return {}
    columns = np.flatnonzero(is_categorical).tolist()
    if len(lists) != len(columns):
        raise UsageError(
            f"it has the categories of {len(lists)} columns, and {len(columns)} columns of categories"
        )
    return {
        names[column]: np.array(each, None if all(isinstance(value, int) for value in each) else object)
        for column, each in zip(columns, lists)
    }


def _foreign_tree(lines: Lines, factor: float) -> list[ForeignNode]:
    if int(lines.get("is_linear", "0")):
        raise UsageError(
            "its leaves have linear models, which Ronde's have not: train with linear_tree=False"
        )
    leaves = int(lines["num_leaves"])
    values = [float(value) * factor for value in lines["leaf_value"].split()]
    counts = _ints(lines.get("leaf_count", "")) or [1] * len(values)
    if leaves < 1 or len(values) != leaves or len(counts) != leaves:
        raise UsageError("a tree has different numbers of leaves")
    splits = _splits(lines, leaves - 1) if leaves > 1 else []
    return [*splits, *(ForeignNode(value=value, count=count) for value, count in zip(values, counts))]


def _splits(lines: Lines, count: int) -> list[ForeignNode]:
    columns, thresholds = _ints(lines["split_feature"]), [float(each) for each in lines["threshold"].split()]
    decisions, lefts, rights = (_ints(lines[name]) for name in ("decision_type", "left_child", "right_child"))
    gains = [float(each) for each in lines.get("split_gain", "").split()] or [0.0] * count
    counts = _ints(lines.get("internal_count", "")) or [2] * count
    bounds, words = _ints(lines.get("cat_boundaries", "")), _ints(lines.get("cat_threshold", ""))
    nodes = []
    for number in range(count):
        left, right = (
            child if child >= 0 else count - child - 1 for child in (lefts[number], rights[number])
        )
        node = ForeignNode(
            columns[number], thresholds[number], left, right, gain=gains[number], count=counts[number]
        )
        if math.isnan(node.border) or node.column < 0:
            raise UsageError("a split has no border or no column")
        if decisions[number] & CATEGORY:
            place = int(node.border)
            node.categories = _members(words[bounds[place] : bounds[place + 1]])
        else:
            node.missing_left = _sends_missing_left(decisions[number], node.border, node.column)
        nodes.append(node)
    return nodes


def _sends_missing_left(decision: int, border: float, column: int) -> bool:
    goes_left, zero_left = bool(decision & DEFAULT_LEFT), border >= 0
    if decision & MISSING == MISSING_NAN:
        return goes_left
    if decision & MISSING == MISSING_ZERO and goes_left != zero_left:
        raise UsageError(
            f"column {column} has zeros as missing values, and in Ronde these are numbers: train with "
            "zero_as_missing=False"
        )
    return zero_left  # there NaN counts as 0


def _members(words: list[int]) -> frozenset[int]:
    return frozenset(
        32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1
    )


def _ints(text: str) -> list[int]:
    return [int(each) for each in text.split()]
