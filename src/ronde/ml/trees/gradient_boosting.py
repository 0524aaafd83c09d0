"""`GradientBoostingClassifier` and `GradientBoostingRegressor`: sums of trees, each of which lowers the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from ronde.ml.base import fitting
from ronde.ml.fitted_forms import ClassesForm, FittedForm
from ronde.ml.linear.linear_model import float_targets, with_class_numbers
from ronde.ml.trees.boosted_estimator import GradientBoosting
from ronde.ml.trees.losses import (
    LOGISTIC,
    REGRESSION_LOSSES,
    BoostingLoss,
    OwnLoss,
    regression_loss,
    softmax_loss,
)

__all__ = ["GradientBoostingClassifier", "GradientBoostingRegressor"]

Array = NDArray[Any]


class GradientBoostingRegressor(RegressorMixin, GradientBoosting):
    """A sum of trees that predicts numbers.

        model = GradientBoostingRegressor(max_iter=200, on="local:2").fit(X, y)

    The parameters are those of scikit-learn's `HistGradientBoostingRegressor`, and so are their defaults. The model has
    the same bits for any number of tasks and threads.

    Args:
        loss: "squared_error"; "absolute_error"; "quantile"; "huber"; "poisson", "gamma" or "tweedie" for targets that
            are not negative, the logarithms of whose means are sums of trees; or a function of targets and scores,
            float64 of shape (rows,), that returns first derivatives, second derivatives and losses of the same shape.
            Tasks call it for some rows at a time, perhaps in several threads at once.
        quantile: Of the loss "quantile", 0 to 1. Of "huber": the absolute errors above this quantile, which is computed
            in each step, do not count squared (None: 0.9).
        learning_rate: The factor of the values of leaves.
        max_iter: The number of steps, each of which adds a tree.
        max_leaf_nodes: Of a tree (31; None: no limit).
        max_depth: Of a tree (None: no limit).
        min_samples_leaf: How many rows with a weight above 0 a leaf has at least.
        l2_regularization: The factor of half the squared values of leaves, added to the loss.
        max_features: Which part of the columns is drawn for each node, above 0 to 1.
        max_bins: How many bins a column has at most, without that of missing values.
        categorical_features: Which columns are categories: numbers, names, or a mask (None: none is; "from_dtype":
            those of a data frame whose dtype is of categories). They are numbers from 0; in data frames also texts.
        monotonic_cst: 1 for each column with which the prediction may not fall, -1 for one with which it may not rise,
            0 for others; or a dict with these by name.
        interaction_cst: Groups of columns, by number or name: the columns on a path from the root to a leaf are all in
            one group; columns that no group names are another one. "pairwise": any two columns; "no_interactions": one
            column; None: any.
        warm_start: Whether a second fit keeps the trees of the first, and adds others.
        early_stopping: Whether the fit ends when the loss does not fall any more ("auto": with more than 10,000 rows or
            with X_val).
        validation_fraction: Which part of the rows is held out for that (None: none is; the loss of all rows counts).
        scoring: What judges a step for early stopping: "loss"; the name of a scorer of scikit-learn or a function of
            model, X and y, whose score rises; None: the method `score`. Other than the loss needs rows in memory.
        n_iter_no_change: For how many steps the loss does not fall.
        tol: By how much it has to fall.
        random_state: An int or a `numpy.random.RandomState`; None: 0.
        subsample: Which part of the rows is drawn for each step.
        l1_regularization: The factor of the absolute values of leaves, added to the loss.
        min_hessian_leaf: The least sum of second derivatives of a leaf.
        min_gain: A split has to lower twice the loss by more.
        power: Of the loss "tweedie", between 1 and 2: the variance of y is in proportion to this power of its mean.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: the ranks of this job, or one task that uses the
            cores of this machine).
        verbose: Whether to print a line for each step.

    Attributes:
        n_iter_: The number of steps.
        train_score_: The negative loss before the first step and after each; with early stopping by another `scoring`
            the scores of at most about 10,000 rows of the fit.
        validation_score_: That of the rows of the validation, held out or given; empty if there are none.
        feature_importances_: How much the splits of each column lower the loss, with the sum 1.
        history_: A `History` with `step`, `loss`, and `validation_loss` if rows are held out or given; by another
            `scoring` also `score` and `validation_score`.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **GradientBoosting._parameter_constraints,
        "loss": [StrOptions(REGRESSION_LOSSES), callable],
        "quantile": [Interval(Real, 0, 1, closed="both"), None],
        "power": [Interval(Real, 1, 2, closed="neither")],
    }

    def __init__(
        self,
        loss: str | OwnLoss = "squared_error",
        *,
        quantile: float | None = None,
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
        scoring: Any = "loss",
        validation_fraction: float | None = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-7,
        random_state: Any = None,
        subsample: float = 1.0,
        l1_regularization: float = 0.0,
        min_hessian_leaf: float = 1e-3,
        min_gain: float = 0.0,
        power: float = 1.5,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.loss, self.quantile, self.learning_rate, self.max_iter = loss, quantile, learning_rate, max_iter
        self.max_leaf_nodes, self.max_depth, self.min_samples_leaf = (
            max_leaf_nodes,
            max_depth,
            min_samples_leaf,
        )
        self.l2_regularization, self.max_features, self.max_bins = l2_regularization, max_features, max_bins
        self.categorical_features, self.monotonic_cst = categorical_features, monotonic_cst
        self.interaction_cst = interaction_cst
        self.warm_start, self.early_stopping, self.scoring = warm_start, early_stopping, scoring
        self.validation_fraction, self.n_iter_no_change, self.tol = validation_fraction, n_iter_no_change, tol
        self.random_state, self.subsample, self.l1_regularization = random_state, subsample, l1_regularization
        self.min_hessian_leaf, self.min_gain, self.power = min_hessian_leaf, min_gain, power
        self.on, self.verbose = on, verbose

    @fitting
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
        sample_weight_val: Any = None,
    ) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a sparse matrix or a data frame, in which NaN is a missing value; or
                the path of Parquet files, a Spark data frame, or what `ronde.comqueue.read` returns.
            y: The targets, shape (rows,); or the name of a column of X.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.
            X_val: Rows in memory that do not grow trees, and by whose loss or score the fit ends early, shape
                (other rows, features) (None: `validation_fraction` of the rows are held out).
            y_val: Their targets, shape (other rows,).
            sample_weight_val: Their weights, shape (other rows,), not negative (None: 1 for each row).

        Raises:
            ValueError: The arguments do not fit together, or y does not suit the loss.
            RemoteError: A task failed.
        """
        if self.loss == "quantile" and self.quantile is None:
            raise ValueError("When loss='quantile', quantile must be a number between 0 and 1")
        loss = self._loss
        data, categories = self._data(X, y, sample_weight, y_numeric=True)
        are_all = isinstance(data.rows, Mapping)
        data = data.mapped(partial(checked_targets, loss=loss, name=str(self.loss), are_all=are_all))
        given = self._given_rows(
            X_val, y_val, sample_weight_val, categories, partial(targets_for, loss, self.loss)
        )
        return self._fit(data, loss, categories, {}, given)

    def predict(self, X: Any) -> Array:
        """Return the predicted numbers, float64 of shape (rows,).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        scores = self._checked_scores(X)
        return self._loss.predictions(scores)

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """Yield the predictions after each step, float64 of shape (rows,).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        check_is_fitted(self)
        for scores in self._staged_scores(X, 1):
            yield self._loss.predictions(scores.copy())

    @property
    def _loss(self) -> BoostingLoss:
        return regression_loss(self.loss, self.quantile, self.power)


class GradientBoostingClassifier(ClassifierMixin, GradientBoosting):
    """A sum of trees that predicts the probabilities of classes.

        model = GradientBoostingClassifier(max_iter=200, on="local:2").fit(X, y)

    With more than two classes, each step adds a tree for each class. The parameters are those of scikit-learn's
    `HistGradientBoostingClassifier`, and so are their defaults. The model has the same bits for any number of tasks and
    threads.

    Args:
        loss: "log_loss".
        class_weight: A factor of the rows' weights for each class, as a dict; "balanced": classes weigh the same.
        learning_rate, max_iter, max_leaf_nodes, max_depth, min_samples_leaf: As of `GradientBoostingRegressor`.
        l2_regularization, l1_regularization, min_hessian_leaf, min_gain: The same.
        max_features, subsample, max_bins, categorical_features, monotonic_cst, interaction_cst: The same.
        warm_start, early_stopping, scoring, validation_fraction, n_iter_no_change, tol: The same.
        random_state, on, verbose: The same.

    Attributes:
        classes_: The classes, sorted.
        n_iter_: The number of steps.
        train_score_: The negative loss before the first step and after each; with early stopping by another `scoring`
            the scores of at most about 10,000 rows of the fit.
        validation_score_: That of the rows of the validation, held out or given; empty if there are none.
        feature_importances_: How much the splits of each column lower the loss, with the sum 1.
        history_: A `History` with `step`, `loss`, and `validation_loss` if rows are held out or given; by another
            `scoring` also `score` and `validation_score`.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **GradientBoosting._parameter_constraints,
        "loss": [StrOptions({"log_loss"})],
        "class_weight": [dict, StrOptions({"balanced"}), None],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        "classes_": ClassesForm(),  # before the scores, which are compared with them
        **GradientBoosting._fitted_forms,
    }

    classes_: Array

    def __init__(
        self,
        loss: str = "log_loss",
        *,
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
        scoring: Any = "loss",
        validation_fraction: float | None = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-7,
        random_state: Any = None,
        class_weight: Any = None,
        subsample: float = 1.0,
        l1_regularization: float = 0.0,
        min_hessian_leaf: float = 1e-3,
        min_gain: float = 0.0,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.loss, self.learning_rate, self.max_iter = loss, learning_rate, max_iter
        self.max_leaf_nodes, self.max_depth, self.min_samples_leaf = (
            max_leaf_nodes,
            max_depth,
            min_samples_leaf,
        )
        self.l2_regularization, self.max_features, self.max_bins = l2_regularization, max_features, max_bins
        self.categorical_features, self.monotonic_cst = categorical_features, monotonic_cst
        self.interaction_cst = interaction_cst
        self.warm_start, self.early_stopping, self.scoring = warm_start, early_stopping, scoring
        self.validation_fraction, self.n_iter_no_change, self.tol = validation_fraction, n_iter_no_change, tol
        self.random_state, self.class_weight, self.subsample = random_state, class_weight, subsample
        self.l1_regularization, self.min_hessian_leaf, self.min_gain = (
            l1_regularization,
            min_hessian_leaf,
            min_gain,
        )
        self.on, self.verbose = on, verbose

    @fitting
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        X_val: Any = None,
        y_val: Any = None,
        sample_weight_val: Any = None,
    ) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a sparse matrix or a data frame, in which NaN is a missing value; or
                the path of Parquet files, a Spark data frame, or what `ronde.comqueue.read` returns.
            y: The classes, shape (rows,): numbers or texts; or the name of a column of X, with numbers.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.
            X_val: Rows in memory that do not grow trees, and by whose loss or score the fit ends early, shape
                (other rows, features) (None: `validation_fraction` of the rows are held out).
            y_val: Their targets, shape (other rows,).
            sample_weight_val: Their weights, shape (other rows,), not negative (None: 1 for each row).

        Raises:
            ValueError: The arguments do not fit together, or y has only one class.
            RemoteError: A task failed.
        """
        data, categories = self._data(X, y, sample_weight, are_classes=True)
        data, classes = with_class_numbers(data, self.class_weight)
        given = self._given_rows(X_val, y_val, sample_weight_val, categories, partial(class_numbers, classes))
        return self._fit(data, loss_of_classes(len(classes)), categories, {"classes_": classes}, given)

    def decision_function(self, X: Any) -> Array:
        """Return the scores: shape (rows,) for two classes, where a positive one stands for the second class; else
        (rows, classes).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        scores = self._checked_scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, float64 of shape (rows, classes).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        scores = self._checked_scores(X)
        return self._loss.predictions(scores)

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each row.

        Args:
            X: As of `decision_function`.

        Raises:
            NotFittedError: As of `decision_function`.
            ValueError: As of `decision_function`.
        """
        return self._classes_of(self._checked_scores(X))

    def staged_decision_function(self, X: Any) -> Iterator[Array]:
        """Yield the scores after each step, as `decision_function` returns them.

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        check_is_fitted(self)
        for scores in self._staged_scores(X, len(self.baseline_)):
            yield (scores[:, 0] if scores.shape[1] == 1 else scores).copy()

    def staged_predict_proba(self, X: Any) -> Iterator[Array]:
        """Yield the probabilities after each step, float64 of shape (rows, classes).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        check_is_fitted(self)
        for scores in self._staged_scores(X, len(self.baseline_)):
            yield self._loss.predictions(scores)

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """Yield the most likely classes after each step, shape (rows,).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        check_is_fitted(self)
        for scores in self._staged_scores(X, len(self.baseline_)):
            yield self._classes_of(scores)

    def _classes_of(self, scores: Array) -> Array:
        numbers = (scores[:, 0] > 0).astype(np.intp) if scores.shape[1] == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[numbers])

    @property
    def _loss(self) -> BoostingLoss:
        return loss_of_classes(len(self.classes_))


def checked_targets(parts: dict[str, Any], loss: BoostingLoss, name: str, are_all: bool) -> dict[str, Any]:
    """Return parts of the data with float64 targets. Raises ValueError unless these suit the loss of that name.

    `are_all`: whether the parts contain all rows of the fit.
    """
    checked = float_targets(parts)
    if problem := loss.targets_problem(checked["y"], name, are_all):
        raise ValueError(problem)
    return checked


def targets_for(loss: BoostingLoss, name: Any, y: Array) -> Array:
    """Return targets of the validation as float64. Raises ValueError unless they suit the loss of that name."""
    y = np.ascontiguousarray(y, np.float64)
    if problem := loss.targets_problem(y, str(name), are_all=False):
        raise ValueError(f"y_val: {problem}")
    return y


def class_numbers(classes: Array, y: Array) -> Array:
    """Return the numbers of classes, float64. Raises ValueError if y has others than the fit."""
    unknown = sorted(set(np.unique(y).tolist()) - set(classes.tolist()), key=str)
    if unknown:
        raise ValueError(f"y_val has the classes {unknown}, and y has {classes.tolist()}: expected no others")
    return np.searchsorted(classes, y).astype(np.float64)


def loss_of_classes(classes: int) -> BoostingLoss:
    """Return the loss of two or more classes."""
    return LOGISTIC if classes == 2 else softmax_loss(classes)
