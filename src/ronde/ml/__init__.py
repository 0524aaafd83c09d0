"""`ronde.ml`: estimators with scikit-learn's interface that fit in several tasks.

    from ronde.ml import KMeans

    labels = KMeans(n_clusters=16, random_state=0, on="local:2").fit_predict(points)

It needs `pip install 'ronde[ml]'`. See docs/estimators.md. A name is imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ronde.launch.clusters.platforms import needs_package

if TYPE_CHECKING:
    from ronde.ml.clustering.kmeans import KMeans, MiniBatchKMeans
    from ronde.ml.history import History
    from ronde.ml.linear.coordinate_descent import ElasticNet, Lasso
    from ronde.ml.linear.least_squares import LinearRegression, Ridge
    from ronde.ml.linear.linear_svc import LinearSVC
    from ronde.ml.linear.logistic_regression import LogisticRegression
    from ronde.ml.linear.perceptron import Perceptron
    from ronde.ml.saving import load
    from ronde.ml.topics.latent_dirichlet_allocation import LatentDirichletAllocation
    from ronde.ml.trees.foreign_models import load_lightgbm, load_xgboost
    from ronde.ml.trees.gradient_boosting import GradientBoostingClassifier, GradientBoostingRegressor
    from ronde.ml.trees.gradient_boosting_ranker import GradientBoostingRanker
    from ronde.ml.trees.random_forest import (
        ExtraTreesClassifier,
        ExtraTreesRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from ronde.ml.words.word2vec import Word2Vec

__all__ = [
    "ElasticNet",
    "ExtraTreesClassifier",
    "ExtraTreesRegressor",
    "GradientBoostingClassifier",
    "GradientBoostingRanker",
    "GradientBoostingRegressor",
    "History",
    "KMeans",
    "Lasso",
    "LatentDirichletAllocation",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "MiniBatchKMeans",
    "Perceptron",
    "RandomForestClassifier",
    "RandomForestRegressor",
    "Ridge",
    "Word2Vec",
    "load",
    "load_lightgbm",
    "load_xgboost",
]

# The estimators of rows and where they are. Files of saved estimators may name these classes, those of
# `TEXT_ESTIMATORS` and `RANKERS`, and no others.
ESTIMATORS = {
    "ElasticNet": "ronde.ml.linear.coordinate_descent",
    "ExtraTreesClassifier": "ronde.ml.trees.random_forest",
    "ExtraTreesRegressor": "ronde.ml.trees.random_forest",
    "GradientBoostingClassifier": "ronde.ml.trees.gradient_boosting",
    "GradientBoostingRegressor": "ronde.ml.trees.gradient_boosting",
    "KMeans": "ronde.ml.clustering.kmeans",
    "Lasso": "ronde.ml.linear.coordinate_descent",
    "LatentDirichletAllocation": "ronde.ml.topics.latent_dirichlet_allocation",
    "LinearRegression": "ronde.ml.linear.least_squares",
    "LinearSVC": "ronde.ml.linear.linear_svc",
    "LogisticRegression": "ronde.ml.linear.logistic_regression",
    "MiniBatchKMeans": "ronde.ml.clustering.kmeans",
    "Perceptron": "ronde.ml.linear.perceptron",
    "RandomForestClassifier": "ronde.ml.trees.random_forest",
    "RandomForestRegressor": "ronde.ml.trees.random_forest",
    "Ridge": "ronde.ml.linear.least_squares",
}

TEXT_ESTIMATORS = {"Word2Vec": "ronde.ml.words.word2vec"}  # whose X are sentences

RANKERS = {
    "GradientBoostingRanker": "ronde.ml.trees.gradient_boosting_ranker"
}  # which need the query of each row

_LAZY = {
    **ESTIMATORS,
    **TEXT_ESTIMATORS,
    **RANKERS,
    "History": "ronde.ml.history",
    "load": "ronde.ml.saving",
    "load_lightgbm": "ronde.ml.trees.foreign_models",
    "load_xgboost": "ronde.ml.trees.foreign_models",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(
            f"module 'ronde.ml' has no attribute {name!r}; it has {', '.join(sorted(__all__))}",
            name=name,
            obj=sys.modules[__name__],
        )
    with needs_package("sklearn", "ml"):
        value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
