"""`LogisticRegression`: probabilities of two or more classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.utils._param_validation import Interval, StrOptions

from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import INTS, ArrayForm, FittedForm
from ronde.ml.linear.column_scaling import StandardizedObjective, curvature_scaling
from ronde.ml.linear.linear_model import ClassSigns, LinearClassifier, split_weights, with_class_numbers
from ronde.ml.losses import LogisticLoss, MultinomialLoss
from ronde.ml.optimizers import LBFGS, OWLQN, LinearObjective, Newton, Optimizer
from ronde.ml.training_data import training_data

__all__ = ["LogisticRegression"]

Array = NDArray[Any]

MOST_FACTOR = 1000.0  # more, and rounding errors would keep the gradient above tol
MOST_CURVATURE = 0.25  # the largest second derivative of the loss by a score


class LogisticRegression(LinearClassifier):
    """Probabilities of classes: logistic for two, multinomial for more.

        model = LogisticRegression(on="local:2").fit(X, y)

    It minimizes, with the weighted number of rows n,

        mean loss  +  l1_ratio / (C n) * |w|_1  +  (1 - l1_ratio) / (2 C n) * |w|_2^2

    by L-BFGS, Newton's method, or, if l1_ratio is above 0, by OWL-QN. All find the same minimum.

    Args:
        C: The inverse of the strength of the penalties; `inf`: none. Intercepts are not penalized.
        l1_ratio: The part of the penalty on absolute values, 0 to 1.
        tol: The largest component of the gradient at which the fit ends, by coefficients of X or of columns with
            variance 1, whichever is larger (by those of X up to 1,000 times).
        fit_intercept: Whether there are intercepts.
        class_weight: A factor of the rows' weights for each class, as a dict; "balanced": classes weigh the same.
        max_iter: The largest number of steps.
        warm_start: Whether a second fit starts from the coefficients of the first. Both need the same number of
            classes and columns.
        solver: "lbfgs"; "newton-cg" or "newton-cholesky" for Newton's method: fewer steps, each more expensive.
            scikit-learn's "sag" and "saga" stand for "lbfgs" here.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        classes_: The classes, sorted.
        coef_: Shape (1, features) for two classes, else (classes, features).
        intercept_: Shape (1,) or (classes,).
        n_iter_: The number of steps, an array of shape (1,).
        history_: A `History` with `step`, `loss` (the objective), `gradient_norm` and `step_length`.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "C": [Interval(Real, 0, None, closed="right")],
        "l1_ratio": [Interval(Real, 0, 1, closed="both")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
        "solver": [StrOptions({"lbfgs", "newton-cg", "newton-cholesky", "sag", "saga"})],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **LinearClassifier._fitted_forms,
        "n_iter_": ArrayForm(("fits",), INTS),
    }

    def __init__(
        self,
        *,
        C: float = 1.0,
        l1_ratio: float = 0.0,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        class_weight: Any = None,
        max_iter: int = 100,
        warm_start: bool = False,
        solver: str = "lbfgs",
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.C, self.l1_ratio, self.tol, self.fit_intercept = C, l1_ratio, tol, fit_intercept
        self.class_weight, self.max_iter, self.warm_start = class_weight, max_iter, warm_start
        self.solver = solver
        self.random_state, self.on, self.verbose = random_state, on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix; or the path of Parquet files, a
                Spark data frame, or what `ronde.comqueue.read` returns.
            y: The classes, shape (rows,): numbers or texts; or the name of a column of X, with numbers.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together, contain NaN or infinity, or y has only one class; or
                `warm_start` is True, and the earlier fit had another number of classes or columns.
            RemoteError: A task failed.
        """
        data = training_data(self, X, y, sample_weight, accept_sparse="csr", are_classes=True)
        progress = self._progress(self.max_iter, data.for_callbacks)
        data, classes = with_class_numbers(data, self.class_weight)
        is_binary = len(classes) == 2
        dtype = data.dtype

        strength = 1 / (self.C * data.total_weight)
        scaling = curvature_scaling(self, data, (1 - self.l1_ratio) / 2 * strength, MOST_CURVATURE)

        def attributes_of(w: Array) -> Mapping[str, Any]:
            w = np.atleast_2d(scaling.for_rows(w))
            coef, intercept = split_weights(w, self.fit_intercept, dtype)
            return {"classes_": classes, "coef_": coef, "intercept_": intercept}

        objective = LinearObjective(
            LogisticLoss() if is_binary else MultinomialLoss(len(classes)),
            l1=self.l1_ratio * strength,
            l2=(1 - self.l1_ratio) / 2 * strength,
            fit_intercept=self.fit_intercept,
        )
        shape = (data.num_features + self.fit_intercept,)
        result = self._minimize(
            self._optimizer(),
            StandardizedObjective(objective, scaling, MOST_FACTOR),
            data.mapped(ClassSigns(1)) if is_binary else data,
            scaling.for_columns(self._start(shape if is_binary else (len(classes), *shape))),
            progress,
            attributes_of,
        )
        self._set({**attributes_of(result.w), "n_iter_": np.array([max(1, result.n_iter)], np.int32)})
        self._end_fit(progress, result.history)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, shape (rows, classes).

        Args:
            X: As of `decision_function`.

        Raises:
            NotFittedError: As of `decision_function`.
            ValueError: As of `decision_function`.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        probabilities: Array = softmax(scores, axis=1)
        return probabilities

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of each class, shape (rows, classes).

        Args:
            X: As of `decision_function`.

        Raises:
            NotFittedError: As of `decision_function`.
            ValueError: As of `decision_function`.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([log_expit(-scores), log_expit(scores)], axis=1)
        logarithms: Array = log_softmax(scores, axis=1)
        return logarithms

    def _optimizer(self) -> Optimizer:
        is_newton, has_l1 = self.solver.startswith("newton"), self.l1_ratio > 0 and math.isfinite(self.C)
        if is_newton and has_l1:
            raise ValueError(
                f"solver={self.solver!r} needs l1_ratio=0.0, and it is {self.l1_ratio}: leave solver out for a penalty "
                "on absolute values"
            )
        kind = Newton if is_newton else OWLQN if has_l1 else LBFGS
        return kind(self.max_iter, self.tol)

    def _start(self, shape: tuple[int, ...]) -> Array:
        """Return the weights of the first step. Raises ValueError if those of an earlier fit have another shape."""
        if not (self.warm_start and hasattr(self, "coef_")):
            return np.zeros(shape)
        expected = (shape[0] if len(shape) == 2 else 1, shape[-1] - self.fit_intercept)
        self._check_warm_start(expected, "classes")
        parts = [self.coef_, np.reshape(self.intercept_, (-1, 1))] if self.fit_intercept else [self.coef_]
        return np.hstack(parts).reshape(shape)
