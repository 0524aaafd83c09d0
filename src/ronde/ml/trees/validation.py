"""By what a fit of boosting ends early: rows given in `fit`, and scores by a scorer of scikit-learn.

All tasks have the given rows and predict them alike, so their losses have the same bits without communication. A scorer
runs on task 0 only, which gathers the scores of the rows that it needs; the other tasks get its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import vstack
from sklearn.metrics import check_scoring
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import _check_sample_weight, _check_y

from ronde.comqueue import IterationStep
from ronde.ml.source_data import is_sparse

__all__ = ["GivenRows", "ScoredRows", "Scoring", "given_rows", "joined_rows"]

Array = NDArray[Any]

ROWS_OF_SCORES = 10_000  # of the rows of the fit that a scorer gets, as in scikit-learn


@dataclass(frozen=True)
class GivenRows:
    """Rows that do not grow trees, and whose loss ends the fit.

    Attributes:
        X: Shape (rows, columns), an array or CSR.
        y: float64: targets, or numbers of classes.
        weights: float64; None: 1 each.
    """

    X: Any
    y: Array
    weights: Array | None


def given_rows(
    estimator: Any,
    checked_rows: Callable[[Any], Any],
    given: tuple[Any, Any, Any],
    targets_of: Callable[[Array], Array],
) -> GivenRows | None:
    """Return the rows of the arguments X_val, y_val and sample_weight_val of `fit`; None: there are none.

    `checked_rows`: returns X with the columns of the fit; `targets_of`: y as float64. Raises ValueError.
    """
    X, y, weights = given
    if X is None and y is None and weights is None:
        return None
    if X is None and y is None:
        raise ValueError("sample_weight_val is provided, but X_val and y_val were not provided.")
    if y is None:
        raise ValueError("X_val is provided, but y_val was not provided.")
    if X is None:
        raise ValueError("y_val is provided, but X_val was not provided.")
    if estimator.early_stopping is False:
        raise ValueError(
            "X_val and y_val are passed to fit while at the same time early_stopping is False. When passing X_val and "
            "y_val to fit, early_stopping should be set to either 'auto' or True."
        )
    X, y = checked_rows(X), targets_of(_check_y(y, estimator=estimator))
    check_consistent_length(X, y)
    if weights is not None:
        weights = _check_sample_weight(weights, X, dtype=np.float64, ensure_non_negative=True)
    return GivenRows(X, y, weights)


class FittedModel(Protocol):
    """An estimator of boosting, as a scorer needs it."""

    classes_: Array

    def _checked_scores(self, X: Any) -> Array: ...


class Scoring:
    """Calls a scorer of scikit-learn with an estimator that is being fitted. Travels to the tasks.

    Args:
        model: An estimator that is not fitted, with the attributes that are known before the fit.
        scorer: The parameter `scoring`: a name, a function, or None for the method `score`.
        attributes_of: Returns the fitted attributes for a state.
    """

    def __init__(
        self, model: Any, scorer: Any, attributes_of: Callable[[Any, Any], Mapping[str, Any]]
    ) -> None:
        self._model, self._scorer, self._attributes_of = model, scorer, attributes_of

    @property
    def num_classes(self) -> int:
        """How many classes there are; 0: the targets are numbers."""
        return len(getattr(self._model, "classes_", ()))

    def score(self, rows: ScoredRows, scores: Array, state: Any) -> float:
        """Return the score of rows on task 0. `scores`: of the rows, before the loss makes predictions of them."""
        model, X = self._model, rows.X

        def known_scores(given: Any) -> Array:
            if given is X:
                return scores.copy()
            vars(model).update(self._attributes_of(model, state))  # a user's scorer predicts other rows
            return np.asarray(type(model)._checked_scores(model, given))

        y = model.classes_[rows.y.astype(np.intp)] if hasattr(model, "classes_") else rows.y
        named = {} if rows.weights is None else {"sample_weight": rows.weights}
        model._checked_scores = known_scores
        try:
            return float(check_scoring(model, scoring=self._scorer)(model, X, y, **named))
        finally:
            del model._checked_scores


@dataclass(frozen=True)
class ScoredRows:
    """Rows that a scorer gets.

    Attributes:
        chosen: Which rows of this task, a mask; None: they are given in `fit`.
        X, y, weights: Of the rows of all tasks, on task 0.
    """

    chosen: Array | None
    X: Any
    y: Array
    weights: Array | None


def joined_rows(c: IterationStep, chosen: Array, y: Array, weights: Array | None) -> ScoredRows:
    """Return the chosen rows of all tasks, which are in memory. `y`, `weights`: of this task."""
    own = (c.data.X[np.flatnonzero(chosen)], y[chosen], None if weights is None else weights[chosen])
    parts = [part for part in c.gather(own) if len(part[1])] or [own]
    if c.task_id:
        return ScoredRows(chosen, *own)
    X = [part[0] for part in parts]
    joined = vstack(X, format="csr") if is_sparse(X[0]) else np.concatenate(X)
    all_weights = None if weights is None else np.concatenate([part[2] for part in parts])
    return ScoredRows(chosen, joined, np.concatenate([part[1] for part in parts]), all_weights)
