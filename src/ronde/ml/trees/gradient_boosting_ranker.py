"""`GradientBoostingRanker`: a sum of trees that ranks the rows of each query."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_sample_weight

from ronde.ml.base import fitting
from ronde.ml.linear.linear_model import float_targets
from ronde.ml.trees.boosted_estimator import GradientBoosting
from ronde.ml.trees.losses import ranking_loss
from ronde.ml.trees.queries import (
    check_queries,
    check_weights,
    ndcg_of_queries,
    query_starts,
    relevance_problem,
)

__all__ = ["GradientBoostingRanker"]

Array = NDArray[Any]

MISSING = ("None", "nan", "<NA>", "NaT")  # as Python prints missing values
LACKS_QUERIES = "qid has missing values: expected the query of each row, a number or a text"


class GradientBoostingRanker(GradientBoosting):
    """A sum of trees whose order of the rows of each query has a high NDCG: LambdaRank.

        model = GradientBoostingRanker(max_iter=200, on="local:2").fit(X, relevances, qid=queries)

    The gain of a row of relevance y is 2**y - 1, and the discount at rank r, from 1, is 1 / log2(1 + r). The model has
    the same bits for any number of tasks and threads.

    Args:
        ndcg_at: How many rows of a query, the first ones by score, count: for the loss, and for the default of `score`.
            Pairs of rows count if at least one of them is among these.
        learning_rate, max_iter, max_leaf_nodes, max_depth, min_samples_leaf: As of `GradientBoostingRegressor`.
        l2_regularization, l1_regularization, min_hessian_leaf, min_gain: The same.
        max_features, subsample, max_bins, categorical_features, monotonic_cst, interaction_cst: The same.
        warm_start, early_stopping, scoring, n_iter_no_change, tol: The same.
        validation_fraction: Which part of the queries is held out for early stopping (None: none is).
        random_state, on, verbose: The same.

    Attributes:
        n_iter_: The number of steps.
        train_score_: The mean NDCG, less 1, before the first step and after each; queries without a relevant row count
            with NDCG 1.
        validation_score_: That of queries held out; empty if none are.
        feature_importances_: How much the splits of each column lower the loss, with the sum 1.
        history_: A `History` with `step`, `loss` (1 - NDCG), and `validation_loss` if queries are held out.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **GradientBoosting._parameter_constraints,
        "scoring": [StrOptions({"loss"})],
        "ndcg_at": [Interval(Integral, 1, None, closed="left")],
    }

    loss = "ranking"

    def __init__(
        self,
        *,
        ndcg_at: int = 30,
        learning_rate: float = 0.1,
        max_iter: int = 100,
        max_leaf_nodes: int | None = 31,
        max_depth: int | None = None,
        min_samples_leaf: int = 20,
        l2_regularization: float = 0.0,
        max_features: float = 1.0,
        max_bins: int = 255,
        categorical_features: Any = "from_dtype",
        monotonic_cst: Any = None,
        interaction_cst: Any = None,
        warm_start: bool = False,
        early_stopping: bool | str = "auto",
        scoring: str = "loss",
        validation_fraction: float | None = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-7,
        random_state: Any = None,
        subsample: float = 1.0,
        l1_regularization: float = 0.0,
        min_hessian_leaf: float = 1e-3,
        min_gain: float = 0.0,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.ndcg_at = ndcg_at
        self.learning_rate, self.max_iter = learning_rate, max_iter
        self.max_leaf_nodes, self.max_depth = max_leaf_nodes, max_depth
        self.min_samples_leaf = min_samples_leaf
        self.l2_regularization, self.max_features, self.max_bins = l2_regularization, max_features, max_bins
        self.categorical_features, self.monotonic_cst = categorical_features, monotonic_cst
        self.interaction_cst = interaction_cst
        self.warm_start, self.early_stopping, self.scoring = warm_start, early_stopping, scoring
        self.validation_fraction, self.n_iter_no_change, self.tol = validation_fraction, n_iter_no_change, tol
        self.random_state, self.subsample, self.l1_regularization = random_state, subsample, l1_regularization
        self.min_hessian_leaf, self.min_gain = min_hessian_leaf, min_gain
        self.on, self.verbose = on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, qid: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: As of `GradientBoostingRegressor.fit`.
            y: The relevances, whole numbers from 0 to 31, shape (rows,); or the name of a column of X.
            qid: The query of each row, numbers or texts, shape (rows,), with the rows of a query next to each other; or
                the name of a column of X.
            sample_weight: The weight of each row's query, shape (rows,), not negative (None: 1); or the name of a
                column of X.

        Raises:
            ValueError: The arguments do not fit together, there is no qid, or a query has rows in several places or
                of several weights.
            RemoteError: A task failed.
        """
        if qid is None:
            raise ValueError("qid is None: expected the query of each row, as in fit(X, y, qid=queries)")
        if not isinstance(qid, str):
            check_queries_of_rows(qid)
        data, categories = self._data(X, y, sample_weight, qid=qid, y_numeric=True)
        if isinstance(data.rows, Mapping) and "sample_weight" in data.rows:
            check_weights(data.rows["sample_weight"], query_starts(data.rows["qid"]))
        return self._fit(data.mapped(checked_relevances), ranking_loss(self.ndcg_at), categories, {})

    def predict(self, X: Any) -> Array:
        """Return the scores by which the rows of a query are ranked, the largest first; float64 of shape (rows,).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        return np.asarray(self._checked_scores(X)[:, 0])

    def score(
        self, X: Any, y: Any, qid: Any = None, ndcg_at: int | None = None, sample_weight: Any = None
    ) -> float:
        """Return the mean NDCG of queries; 1 is that of one without a relevant row.

        Args:
            X: Shape (rows, features), an array or a data frame.
            y: The relevances, shape (rows,).
            qid: The query of each row, shape (rows,), with the rows of a query next to each other.
            ndcg_at: How many rows of a query, the first ones by score, count (None: as in the fit).
            sample_weight: The weight of each row's query, shape (rows,), not negative (None: 1).

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: The arguments do not fit together, or there is no qid.
        """
        if qid is None:
            raise ValueError("qid is None: expected the query of each row, as in score(X, y, qid=queries)")
        if ndcg_at is not None and ndcg_at < 1:
            raise ValueError(f"ndcg_at is {ndcg_at}: expected a number of rows, at least 1")
        scores, relevances = self.predict(X), column_or_1d(y).astype(np.float64)
        check_consistent_length(scores, relevances, qid)
        if problem := relevance_problem(relevances):
            raise ValueError(problem)
        starts = check_queries_of_rows(qid)
        weights = _check_sample_weight(sample_weight, scores, dtype=np.float64, ensure_non_negative=True)
        check_weights(weights, starts)
        if not weights.any():
            raise ValueError("the weights of all rows are 0: expected a sum above 0")
        found = ndcg_of_queries(relevances, scores, starts, ndcg_at or self.ndcg_at)
        return float(np.average(found, weights=weights[starts[:-1]]))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags


def check_queries_of_rows(qid: Any) -> Array:
    """Return at which rows another query begins, as `query_starts`.

    Raises ValueError as `check_queries` does, and unless there is a number or a text for each row.
    """
    qid = np.asarray(qid)
    if qid.ndim != 1:
        raise ValueError(f"qid has shape {qid.shape}: expected (rows,), the query of each row")
    if qid.dtype.kind == "O":  # texts, and numbers beside missing ones
        if any(not isinstance(each, str) and str(each) in MISSING for each in qid.tolist()):
            raise ValueError(LACKS_QUERIES)
        qid = qid.astype(str)
    if qid.dtype.kind == "f" and np.isnan(qid).any():
        raise ValueError(LACKS_QUERIES)
    starts = query_starts(qid)
    check_queries(qid[starts[:-1]])
    return starts


def checked_relevances(parts: dict[str, Any]) -> dict[str, Any]:
    """Return parts of the data with float64 targets. Raises ValueError unless these are relevances."""
    checked = float_targets(parts)
    if problem := relevance_problem(checked["y"]):
        raise ValueError(problem)
    return checked
