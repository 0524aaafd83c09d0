"""Models as files of XGBoost, for programs that predict with XGBoost.

XGBoost's numbers are float32, and its rows go left below a border, not at it. So a border is the float32 number that
follows the largest one which is not above ours: rows of float32 numbers take the same ways.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.trees import Tree, split_trees

__all__ = ["xgboost_model"]

Array = NDArray[Any]

# The objective of each loss, and the base score whose margin is 0.
OBJECTIVES = {
    "squared_error": ("reg:squarederror", 0.0),
    "absolute_error": ("reg:squarederror", 0.0),  # which has the same predictions: the sum of the trees
    "quantile": ("reg:squarederror", 0.0),
    "poisson": ("count:poisson", 1.0),
    "gamma": ("reg:gamma", 1.0),
    "logistic": ("binary:logistic", 0.5),
    "softmax": ("multi:softprob", 0.0),
}
PARAMS: dict[str, dict[str, Any]] = {
    "count:poisson": {"poisson_regression_param": {"max_delta_step": "0.7"}},
}


def xgboost_model(
    trees: dict[str, Array], bins: Bins, baseline: Array, loss: str, names: list[str] | None
) -> str:
    """Return a model as JSON that XGBoost 1.6 or later reads.

    `baseline`: the first scores, which become part of the first trees. `names`: of the columns; None: they have none.
    Raises UsageError if there are columns of categories.
    """
    if bins.is_categorical.any():
        raise UsageError(
            "the model has columns of categories, which Ronde does not write for XGBoost: fit it with their numbers"
        )
    single, scores = split_trees(trees), len(baseline)
    classes = scores if scores > 1 else 0
    for number in range(min(scores, len(single))):
        leaves = single[number]["column"] < 0
        single[number]["value"] = single[number]["value"] + baseline[number] * leaves[:, None]
    objective, base_score = OBJECTIVES[loss]
    params = PARAMS.get(objective, {"reg_loss_param": {"scale_pos_weight": "1"}})
    if classes:
        params = {"softmax_multiclass_param": {"num_class": str(classes)}}
    columns = str(bins.num_columns)
    model = {
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(single))},
        "iteration_indptr": list(range(0, len(single) + 1, scores)),
        "tree_info": trees["scores"].tolist(),
        "trees": [_tree(tree, bins, number) for number, tree in enumerate(single)],
    }
    learner = {
        "attributes": {},
        "feature_names": names or [],
        "feature_types": ["float"] * bins.num_columns if names else [],
        "gradient_booster": {"model": model, "name": "gbtree"},
        "learner_model_param": {
            "base_score": repr(base_score),
            "boost_from_average": "0",
            "num_class": str(classes),
            "num_feature": columns,
            "num_target": "1",
        },
        "objective": {"name": objective, **params},
    }
    return json.dumps({"learner": learner, "version": [2, 0, 0]})


def _tree(tree: Tree, bins: Bins, number: int) -> dict[str, Any]:
    count, lefts = len(tree["column"]), tree["left"].tolist()
    parents = [2**31 - 1] * count
    for node, left in enumerate(lefts):
        if left >= 0:
            parents[left] = parents[left + 1] = node
    is_leaf = tree["column"] < 0
    conditions = [
        float(np.float32(tree["value"][node, 0])) if is_leaf[node] else _border(tree, bins, node)
        for node in range(count)
    ]
    return {
        "base_weights": np.float32(tree["value"][:, 0]).tolist(),
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": tree["missing_left"].tolist(),
        "id": number,
        "left_children": lefts,
        "loss_changes": np.float32(np.minimum(tree["gain"], np.finfo(np.float32).max)).tolist(),
        "parents": parents,
        "right_children": [left + 1 if left >= 0 else -1 for left in lefts],
        "split_conditions": conditions,
        "split_indices": np.where(is_leaf, 0, tree["column"]).tolist(),
        "split_type": [0] * count,
        "sum_hessian": tree["count"].astype(float).tolist(),
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(bins.num_columns),
            "num_nodes": str(count),
            "size_leaf_vector": "1",
        },
    }


def _border(tree: Tree, bins: Bins, node: int) -> float:
    """Return the number below which rows go left. Above all numbers: the largest one."""
    border, largest = bins.border(int(tree["column"][node]), int(tree["bin"][node])), np.finfo(np.float32).max
    if not math.isfinite(border) or abs(border) >= largest:
        return float(math.copysign(largest, border))
    rounded = np.float32(border)
    below = rounded if float(rounded) <= border else np.nextafter(rounded, np.float32(-np.inf))
    return float(np.nextafter(below, np.float32(np.inf)))
