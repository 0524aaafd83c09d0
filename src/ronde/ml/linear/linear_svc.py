"""`LinearSVC`: a linear support vector machine."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils._param_validation import Interval, StrOptions

from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.linear.column_scaling import StandardizedObjective, curvature_scaling
from ronde.ml.linear.linear_model import LinearClassifier, each_class_against_rest, split_weights
from ronde.ml.losses import SquaredHingeLoss
from ronde.ml.optimizers import LBFGS, OWLQN, LinearObjective, Newton, OptimizerResult
from ronde.ml.training_data import training_data

__all__ = ["LinearSVC"]

Array = NDArray[Any]

# Weights: with more, the matrix of second derivatives costs more than the steps that it spares.
MOST_OF_NEWTON = 101
MOST_FACTOR = 1000.0  # as of `LogisticRegression`
MOST_CURVATURE = 2.0  # the largest second derivative of the loss by a score


class LinearSVC(LinearClassifier):
    """A linear support vector machine with the squared hinge loss; for several classes, each against the rest.

        C * sum over rows of weight * max(0, 1 - y * score)^2  +  |w|_2^2 / 2, or |w|_1

    The optimizer is Newton's method, L-BFGS above 100 columns, or OWL-QN for the penalty "l1". Intercepts are not
    penalized; those of scikit-learn are.

    Args:
        penalty: "l2" or "l1".
        C: The inverse of the strength of the penalty.
        tol: The largest component of the gradient of the mean loss at which the fit ends, as of `LogisticRegression`.
        fit_intercept: Whether there are intercepts.
        class_weight: A factor of the rows' weights for each class, as a dict; "balanced": classes weigh the same. With
            more than two classes, a factor counts only where its class is the one against the rest, as in scikit-learn.
        max_iter: The largest number of steps for each class.
        dual: Has no effect: scikit-learn's two methods find the same coefficients.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        classes_: The classes, sorted.
        coef_: Shape (1, features) for two classes, else (classes, features).
        intercept_: Shape (1,) or (classes,).
        n_iter_: The largest number of steps of a class.
        history_: A `History` with `class` (its number), `step`, `loss`, `gradient_norm` and `step_length`.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "penalty": [StrOptions({"l1", "l2"})],
        "C": [Interval(Real, 0, None, closed="neither")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "dual": ["boolean", StrOptions({"auto"})],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        penalty: str = "l2",
        *,
        C: float = 1.0,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        class_weight: Any = None,
        max_iter: int = 1000,
        dual: bool | str = "auto",
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.penalty, self.C, self.tol, self.fit_intercept = penalty, C, tol, fit_intercept
        self.class_weight, self.max_iter = class_weight, max_iter
        self.dual = dual
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
            ValueError: The arguments do not fit together, contain NaN or infinity, or y has only one class.
            RemoteError: A task failed.
        """
        data = training_data(self, X, y, sample_weight, accept_sparse="csr", are_classes=True)
        progress = self._progress(None, data.for_callbacks)
        problems, self.classes_ = each_class_against_rest(data, self.class_weight)
        start = np.zeros(data.num_features + self.fit_intercept)
        kind = OWLQN if self.penalty == "l1" else Newton if start.size <= MOST_OF_NEWTON else LBFGS
        optimizer = kind(self.max_iter, self.tol)
        l2 = 0.0 if self.penalty == "l1" else 1 / (2 * self.C * data.total_weight)
        scaling = curvature_scaling(self, next(iter(problems.values())), l2, MOST_CURVATURE)
        results: list[OptimizerResult] = []

        def attributes_of(*present: Array) -> Mapping[str, Any]:
            """Return coefficients of 0 for classes that have none yet. `present`: weights of the class at work."""
            ws = [*(result.w for result in results), *present]
            ws += [start] * (len(problems) - len(ws))
            w = scaling.for_rows(np.stack(ws))
            coef, intercept = split_weights(w, self.fit_intercept, data.dtype)
            return {"coef_": coef, "intercept_": intercept}

        for problem in problems.values():
            objective = StandardizedObjective(self._objective(problem.total_weight), scaling, MOST_FACTOR)
            results.append(self._minimize(optimizer, objective, problem, start, progress, attributes_of))
        self._set(attributes_of())
        self.n_iter_ = max(1, *(result.n_iter for result in results))
        records = [
            {"class": number, **record}
            for number, result in zip(problems, results)
            for record in result.history
        ]
        self._end_fit(progress, records)
        return self

    def _objective(self, total_weight: float) -> LinearObjective:
        strength, is_l1 = 1 / (self.C * total_weight), self.penalty == "l1"
        return LinearObjective(
            SquaredHingeLoss(),
            l1=strength if is_l1 else 0.0,
            l2=0.0 if is_l1 else strength / 2,
            fit_intercept=self.fit_intercept,
        )
