"""`load_xgboost` and `load_lightgbm`: models of other libraries as estimators."""

from __future__ import annotations

import os
from typing import Any

from ronde.errors import UsageError
from ronde.ml.fitted_forms import find_wrong_attribute
from ronde.ml.history import History
from ronde.ml.trees.foreign_trees import ForeignModel
from ronde.ml.trees.gradient_boosting import GradientBoostingClassifier, GradientBoostingRegressor
from ronde.ml.trees.gradient_boosting_ranker import GradientBoostingRanker
from ronde.ml.trees.lightgbm_text import read_lightgbm
from ronde.ml.trees.xgboost_json import read_xgboost

__all__ = ["load_lightgbm", "load_xgboost"]


def load_xgboost(path: str | os.PathLike[str]) -> Any:
    """Return the estimator with the trees of a model of XGBoost, which predicts the same.

        model = ronde.ml.load_xgboost("model.json")  # from booster.save_model("model.json")

    A classifier has the classes 0, 1, and so on. All trees count, also those after XGBoost's `best_iteration`. With
    `warm_start=True` a fit adds trees.

    Args:
        path: The file, in JSON, with trees ("gbtree" or "dart"). It may be from a stranger.

    Returns:
        A `GradientBoostingClassifier`, `GradientBoostingRegressor` or `GradientBoostingRanker`, as the objective says.

    Raises:
        UsageError: The file is damaged or in another format, its objective or its trees are of a kind that Ronde does
            not have, or a column has more than 254 borders or categories.
        OSError: The file cannot be read.
    """
    return _estimator(read_xgboost(path), path)


def load_lightgbm(path: str | os.PathLike[str]) -> Any:
    """Return the estimator with the trees of a model of LightGBM, which predicts the same.

        model = ronde.ml.load_lightgbm("model.txt")  # from booster.save_model("model.txt")

    A classifier has the classes 0, 1, and so on. With `warm_start=True` a fit adds trees.

    Args:
        path: The file, in text. It may be from a stranger.

    Returns:
        A `GradientBoostingClassifier`, `GradientBoostingRegressor` or `GradientBoostingRanker`, as the objective says.

    Raises:
        UsageError: As of `load_xgboost`.
        OSError: The file cannot be read.
    """
    return _estimator(read_lightgbm(path), path)


def _estimator(model: ForeignModel, path: str | os.PathLike[str]) -> Any:
    try:
        attributes = {**model.attributes, "history_": History()}
    except (UsageError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{os.fspath(path)} cannot be read as a model of {model.library}: {error}") from None
    params = {**model.params, "max_iter": attributes["n_iter_"]}
    estimator: GradientBoostingClassifier | GradientBoostingRanker | GradientBoostingRegressor
    if params["loss"] == "ranking":
        estimator = GradientBoostingRanker(max_iter=params["max_iter"])
    elif model.classes:
        estimator = GradientBoostingClassifier(**{**params, "loss": "log_loss"})
    else:
        estimator = GradientBoostingRegressor(**params)
    if wrong := find_wrong_attribute(estimator._fitted_forms, attributes):
        raise UsageError(f"{os.fspath(path)} cannot be read as a model of {model.library}: {wrong}")
    for name, value in attributes.items():
        setattr(estimator, name, value)
    return estimator
