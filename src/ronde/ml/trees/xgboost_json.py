"""Models as XGBoost's JSON files.

XGBoost's numbers are float32, and its rows go left below a border, not at it. So a border is the float32 number that
follows the largest one which is not above ours: rows of float32 numbers take the same ways. The other way round, our
border is the largest float64 number that becomes a float32 number below XGBoost's.

In XGBoost, the categories of a node go right and unknown ones go left. So a node that sends missing values right
changes its sides.
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
from ronde.ml.trees.foreign_trees import (
    MOST_COLUMNS,
    ForeignModel,
    ForeignNode,
    categories_left,
    whole_categories,
)
from ronde.ml.trees.trees import Tree, split_trees

__all__ = ["read_xgboost", "xgboost_model"]

Array = NDArray[Any]

# The objective of each loss, and the base score whose margin is 0.
OBJECTIVES = {
    "squared_error": ("reg:squarederror", 0.0),
    "absolute_error": ("reg:squarederror", 0.0),  # which has the same predictions: the sum of the trees
    "quantile": ("reg:squarederror", 0.0),
    "ranking": ("rank:ndcg", 0.0),
    "huber": ("reg:squarederror", 0.0),
    "own": ("reg:squarederror", 0.0),
    "poisson": ("count:poisson", 1.0),
    "gamma": ("reg:gamma", 1.0),
    "tweedie": ("reg:tweedie", 1.0),
    "logistic": ("binary:logistic", 0.5),
    "softmax": ("multi:softprob", 0.0),
}
LOSSES = {
    "reg:squarederror": "squared_error",
    "reg:linear": "squared_error",
    "reg:squaredlogerror": "squared_error",  # predictions are the sums of trees, too
    "reg:pseudohubererror": "huber",
    "reg:absoluteerror": "absolute_error",
    "reg:quantileerror": "quantile",
    "count:poisson": "poisson",
    "reg:gamma": "gamma",
    "reg:tweedie": "tweedie",
    "binary:logistic": "logistic",
    "binary:logitraw": "logistic",
    "multi:softprob": "softmax",
    "multi:softmax": "softmax",
    "rank:ndcg": "ranking",
    "rank:pairwise": "ranking",
    "rank:map": "ranking",
}
LOGARITHMS = ("poisson", "gamma", "tweedie")
MANY = 1 << 20  # so many times a sum of hessians is rounded to a whole number


def xgboost_model(
    trees: dict[str, Array],
    bins: Bins,
    baseline: Array,
    loss: str,
    params: Mapping[str, Any],
    names: list[str] | None,
    categories: Mapping[str, Array],
) -> str:
    """Return a model as JSON that XGBoost 1.6 or later reads.

    `baseline`: the first scores, which become part of the first trees; `params`: the power of a loss; `names`: of the
    columns (None: they have none). Raises UsageError if categories are not whole numbers.
    """
    single, scores = split_trees(trees), len(baseline)
    classes = scores if scores > 1 else 0
    for number in range(min(scores, len(single))):
        leaves = single[number]["column"] < 0
        single[number]["value"] = single[number]["value"] + baseline[number] * leaves[:, None]
    objective, base_score = OBJECTIVES[loss]
    known = {
        column: whole_categories(bins, column) for column in np.flatnonzero(bins.is_categorical).tolist()
    }
    columns = str(bins.num_columns)
    model = {
        **({"cats": _names_of_categories(bins, names or [], categories)} if categories else {}),
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(single))},
        "iteration_indptr": list(range(0, len(single) + 1, scores)),
        "tree_info": trees["scores"].tolist(),
        "trees": [_tree(tree, bins, known, number) for number, tree in enumerate(single)],
    }
    types = ["c" if is_categorical else "float" for is_categorical in bins.is_categorical]
    learner = {
        "attributes": {},
        "feature_names": names or [],
        "feature_types": types if names or known else [],
        "gradient_booster": {"model": model, "name": "gbtree"},
        "learner_model_param": {
            "base_score": repr(base_score),
            "boost_from_average": "0",
            "num_class": str(classes),
            "num_feature": columns,
            "num_target": "1",
        },
        "objective": {"name": objective, **_objective_params(objective, classes, params)},
    }
    return json.dumps({"learner": learner, "version": [2, 0, 0]})


def _objective_params(objective: str, classes: int, params: Mapping[str, Any]) -> dict[str, Any]:
    if classes:
        return {"softmax_multiclass_param": {"num_class": str(classes)}}
    if objective == "count:poisson":
        return {"poisson_regression_param": {"max_delta_step": "0.7"}}
    if objective == "reg:tweedie":
        return {"tweedie_regression_param": {"tweedie_variance_power": repr(float(params["power"]))}}
    return {"reg_loss_param": {"scale_pos_weight": "1"}}


def _names_of_categories(bins: Bins, names: list[str], categories: Mapping[str, Array]) -> dict[str, Any]:
    """Return the names of categories as XGBoost 3.1 and later have them, which compare them with those of rows."""
    lists = [categories[name].tolist() if name in categories else [] for name in names]
    encoded = []
    for values in lists:
        texts = [str(value).encode() for value in values]
        offsets = np.cumsum([0, *map(len, texts)]).tolist() if texts else []
        encoded.append({"offsets": offsets, "values": np.frombuffer(b"".join(texts), np.int8).tolist()})
    order = [place for values in lists for place in np.argsort([str(value) for value in values]).tolist()]
    return {
        "enc": encoded,
        "feature_segments": np.cumsum([0, *map(len, lists)]).tolist(),
        "sorted_idx": order,
    }


def _tree(tree: Tree, bins: Bins, known: Mapping[int, list[int]], number: int) -> dict[str, Any]:
    tree, is_turned = _turned(tree, bins)
    count, lefts = len(tree["column"]), tree["left"].tolist()
    parents = [2**31 - 1] * count
    for node, left in enumerate(lefts):
        if left >= 0:
            parents[left] = parents[left + 1] = node
    is_leaf = tree["column"] < 0
    conditions = []
    sets: dict[int, list[int]] = {}  # of categories that go right
    for node in range(count):
        column = int(tree["column"][node])
        if is_leaf[node]:
            conditions.append(float(np.float32(tree["value"][node, 0])))
        elif column in known:
            going = categories_left(tree, node, known[column])
            sets[node] = going if is_turned[node] else sorted(set(known[column]) - set(going))
            conditions.append(0.0)
        else:
            conditions.append(_border(tree, bins, node))
    sizes = [len(each) for each in sets.values()]
    return {
        "base_weights": np.float32(tree["value"][:, 0]).tolist(),
        "categories": [category for each in sets.values() for category in each],
        "categories_nodes": list(sets),
        "categories_segments": np.cumsum([0, *sizes])[:-1].tolist(),
        "categories_sizes": sizes,
        "default_left": (tree["missing_left"] | is_turned).tolist(),
        "id": number,
        "left_children": lefts,
        "loss_changes": np.float32(np.minimum(tree["gain"], np.finfo(np.float32).max)).tolist(),
        "parents": parents,
        "right_children": [left + 1 if left >= 0 else -1 for left in lefts],
        "split_conditions": conditions,
        "split_indices": np.where(is_leaf, 0, tree["column"]).tolist(),
        "split_type": [int(node in sets) for node in range(count)],
        "sum_hessian": tree["count"].astype(float).tolist(),
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(bins.num_columns),
            "num_nodes": str(count),
            "size_leaf_vector": "1",
        },
    }


def _turned(tree: Tree, bins: Bins) -> tuple[Tree, Array]:
    """Return a tree in which nodes that send unknown categories right have their children in the other order, and
    which these are. XGBoost 3.2 predicts wrong numbers unless the right child follows the left one.
    """
    splits = np.flatnonzero(tree["column"] >= 0)
    turned = splits[(bins.is_categorical[tree["column"][splits]] > 0) & (tree["missing_left"][splits] == 0)]
    order = np.arange(len(tree["column"]))
    lefts = tree["left"][turned]
    order[lefts], order[lefts + 1] = lefts + 1, lefts
    is_turned = np.zeros(len(order), np.uint8)
    is_turned[turned] = 1
    return {name: array[order] for name, array in tree.items()}, is_turned[order]


def _border(tree: Tree, bins: Bins, node: int) -> float:
    """Return the number below which rows go left. Above all numbers: the largest one."""
    border, largest = bins.border(int(tree["column"][node]), int(tree["bin"][node])), np.finfo(np.float32).max
    if not math.isfinite(border) or abs(border) >= largest:
        return float(math.copysign(largest, border))
    rounded = np.float32(border)
    below = rounded if float(rounded) <= border else np.nextafter(rounded, np.float32(-np.inf))
    return float(np.nextafter(below, np.float32(np.inf)))


def read_xgboost(path: str | os.PathLike[str]) -> ForeignModel:
    """Return the model that XGBoost wrote to a JSON file. Raises UsageError, OSError."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        return _model(document["learner"], document.get("version") or [0])
    except UsageError as error:
        raise UsageError(f"{os.fspath(path)} cannot be read as a model of XGBoost: {error}") from None
    except (
        AttributeError,
        KeyError,
        ValueError,
        IndexError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UsageError(
            f"{os.fspath(path)} is not a model of XGBoost in JSON, or is damaged ({type(error).__name__}: {error}): "
            'write it with booster.save_model("model.json")'
        ) from None


def _model(learner: dict[str, Any], version: list[int]) -> ForeignModel:
    booster = learner["gradient_booster"]
    if booster["name"] not in ("gbtree", "dart"):
        raise UsageError(f"its booster is {booster['name']!r}: expected gbtree or dart")
    model = (booster["gbtree"] if booster["name"] == "dart" else booster)["model"]
    factors = booster.get("weight_drop") or [1.0] * len(model["trees"])
    objective, param = learner["objective"]["name"], learner["learner_model_param"]
    if objective not in LOSSES or int(param.get("num_target", 1)) > 1:
        raise UsageError(
            f"its objective is {objective!r} with {param.get('num_target', 1)} outputs, whose predictions Ronde "
            f"cannot compute: expected one output, and one of {', '.join(LOSSES)}"
        )
    loss, scores = LOSSES[objective], max(1, int(param["num_class"]))
    if model["tree_info"] != [number % scores for number in range(len(model["trees"]))]:
        raise UsageError("its steps have several trees for each class: train with num_parallel_tree=1")
    types = learner.get("feature_types") or []
    count = int(param["num_feature"])
    if count > MOST_COLUMNS:
        raise UsageError(f"it has {count} columns: expected at most {MOST_COLUMNS}")
    is_categorical = np.array([each == "c" for each in types] or [False] * count)
    trees = [_foreign_tree(tree, float(factor)) for tree, factor in zip(model["trees"], factors, strict=True)]
    for node in (node for tree in trees for node in tree if node.categories is not None):
        is_categorical[node.column] = True
    names = learner.get("feature_names") or None
    if len(is_categorical) != count or (names and len(names) != count) or not trees or len(trees) % scores:
        raise UsageError("it has an impossible number of columns or trees")
    return ForeignModel(
        "XGBoost",
        trees,
        _margins(param["base_score"], loss, scores, objective == "binary:logitraw" and int(version[0]) > 1),
        names,
        is_categorical,
        {"loss": loss, **_params(learner["objective"], loss)},
        classes={"logistic": 2, "softmax": scores}.get(loss, 0),
        categories=_categories(model.get("cats"), names or []),
        knows_all=True,
    )


def _margins(base_score: str, loss: str, scores: int, are_margins: bool) -> Array:
    """Return the first scores of a base score, which is a prediction unless `are_margins`."""
    base = np.array(json.loads(base_score), np.float64).ravel()
    if are_margins:
        pass
    elif loss == "logistic":
        base = np.log(base / (1 - base))
    elif loss in LOGARITHMS:
        base = np.log(base)
    if not np.isfinite(base).all():
        raise UsageError(f"its base score is {base_score}: expected a prediction that is possible")
    return np.broadcast_to(base, scores).copy()


def _params(objective: Mapping[str, Any], loss: str) -> dict[str, Any]:
    if loss == "quantile":
        given = np.array(json.loads(objective["quantile_loss_param"]["quantile_alpha"])).ravel()
        if len(given) != 1:
            raise UsageError(f"it predicts {len(given)} quantiles: train a model for each")
        return {"quantile": float(given[0])}
    if loss == "tweedie":
        return {"power": float(objective["tweedie_regression_param"]["tweedie_variance_power"])}
    return {}


def _categories(cats: Any, names: list[str]) -> dict[str, Array]:
    """Return the names of categories of a model that was fitted to a data frame."""
    found: dict[str, Array] = {}
    for column, encoded in enumerate((cats or {}).get("enc", [])):
        if not encoded["values"]:
            continue
        if "offsets" in encoded:
            if min(encoded["values"]) < 0:
                raise UsageError(
                    f"the categories of the column {names[column]!r} are not ASCII, and XGBoost writes only some bytes "
                    "of them: train with their numbers, as in frame[column].cat.codes"
                )
            content, offsets = np.array(encoded["values"], np.int8).tobytes(), encoded["offsets"]
            texts = [content[begin:end].decode() for begin, end in zip(offsets, offsets[1:])]
            found[names[column]] = np.array(texts, dtype=object)
        else:
            found[names[column]] = np.array(encoded["values"])
    return found


def _foreign_tree(tree: Mapping[str, Any], factor: float) -> list[ForeignNode]:
    if int(tree["tree_param"].get("size_leaf_vector", 1)) > 1:
        raise UsageError('its leaves have several values: train with multi_strategy="one_output_per_tree"')
    starts, sizes = tree.get("categories_segments", []), tree.get("categories_sizes", [])
    going_right = {
        node: frozenset(tree["categories"][start : start + size])
        for node, start, size in zip(tree.get("categories_nodes", []), starts, sizes)
    }
    hessians = np.array(tree["sum_hessian"], np.float64)
    if (hessians != np.rint(hessians)).any():
        hessians = hessians * MANY
    counts = np.rint(hessians).astype(np.int64).tolist()
    nodes = []
    for number, left in enumerate(tree["left_children"]):
        condition = float(tree["split_conditions"][number])
        if left < 0:
            nodes.append(ForeignNode(value=float(np.float32(condition)) * factor, count=counts[number]))
            continue
        if tree["split_indices"][number] < 0:
            raise UsageError("a split has no column")
        node = ForeignNode(
            tree["split_indices"][number],
            left=left,
            right=tree["right_children"][number],
            missing_left=bool(tree["default_left"][number]),
            gain=float(tree["loss_changes"][number]),
            count=counts[number],
        )
        if number in going_right:  # which is the left side of ours
            node.categories, node.left, node.right = going_right[number], node.right, node.left
            node.missing_left = not node.missing_left
        else:
            node.border = _largest_below(condition)
        nodes.append(node)
    return nodes


def _largest_below(border: float) -> float:
    """Return the largest number that, rounded to float32, is below a border."""
    above = np.float32(border)
    below = np.nextafter(above, np.float32(-np.inf))
    middle = float(below) / 2 + float(above) / 2
    if not math.isfinite(middle):
        return float(border)
    return middle if np.float32(middle) < above else float(np.nextafter(middle, -np.inf))
