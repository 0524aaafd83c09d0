"""`ElasticNet`: least squares with penalties on absolute values and squares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import MultiOutputMixin
from sklearn.utils._param_validation import Interval

from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import ArrayForm, FittedForm
from ronde.ml.linear.column_moments import ColumnMoments
from ronde.ml.linear.column_scaling import ColumnScaling, in_range
from ronde.ml.linear.linear_model import (
    FitReport,
    LinearRegressor,
    float_targets,
    regression_weights,
    weights_of_zeros,
)
from ronde.ml.linear.penalized_squares import TOO_MANY_COLUMNS, CoordinateSearch, CoordinateStep
from ronde.ml.linear.standardized_objective import StandardizedObjective
from ronde.ml.linear.target_scaling import target_scaling
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import OWLQN, LinearObjective
from ronde.ml.optimizers.optimizer import Record
from ronde.ml.progress import Progress
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData, training_data

__all__ = ["ElasticNet"]

Array = NDArray[Any]


class ElasticNet(MultiOutputMixin, LinearRegressor):
    """Least squares with two penalties, of which the first makes coefficients exactly 0.

        mean over rows of (prediction - y)^2 / 2  +  alpha * l1_ratio * |w|_1  +  alpha * (1 - l1_ratio) / 2 * |w|_2^2

    The mean is a weighted one. The method is coordinate descent on the columns that have coefficients or may get them;
    for more than 1,000 such columns, OWL-QN. Columns and targets count as if they had the variance 1, so their units
    have no effect on the steps.

    Args:
        alpha: The factor of both penalties. The intercept is not penalized.
        l1_ratio: The part of the first penalty, 0 to 1.
        fit_intercept: Whether there is an intercept.
        max_iter: The largest number of steps.
        tol: The largest component of the gradient, by coefficients of such columns and targets, at which the fit ends.
        warm_start: Whether a second fit starts from the coefficients of the first. Both need the same number of
            outputs and columns.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: Shape (features,), or (outputs, features) if y has several columns.
        intercept_: A number; shape (outputs,) if y has two dimensions; 0.0 without intercepts.
        n_iter_: The number of steps.
        dual_gap_: How far the objective is from its minimum at most; shape (outputs,) if y has two dimensions. NaN
            after a fit by OWL-QN.
        history_: A `History` with `step`, `loss` (the objective) and `gradient_norm`.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "alpha": [Interval(Real, 0, None, closed="left")],
        "l1_ratio": [Interval(Real, 0, 1, closed="both")],
        "fit_intercept": ["boolean"],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
    }

    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **LinearRegressor._fitted_forms,
        "dual_gap_": ArrayForm(("outputs",), least_axes=0),
    }

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-6,
        warm_start: bool = False,
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.alpha, self.l1_ratio, self.fit_intercept = alpha, l1_ratio, fit_intercept
        self.max_iter, self.tol, self.warm_start = max_iter, tol, warm_start
        self.random_state, self.on, self.verbose = random_state, on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix; or the path of Parquet files, a
                Spark data frame, or what `ronde.comqueue.read` returns.
            y: Shape (rows,) or (rows, outputs); or the name of a column of X. Several outputs share each step.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together, or contain NaN or infinity; or `warm_start` is True, and the
                earlier fit had another number of outputs or columns.
            RemoteError: A task failed.
        """
        if self.alpha == 0:
            warnings.warn(
                "With alpha=0, this algorithm does not converge well. You are advised to use the LinearRegression "
                "estimator",
                UserWarning,
                stacklevel=4,
            )
        data = training_data(
            self, X, y, sample_weight, accept_sparse="csr", y_numeric=True, multi_output=True
        )
        outputs, data = data.outputs, data.mapped(float_targets)
        data.require_weight()
        start = self._start(data.num_features, outputs)

        def attributes_of(w: Array) -> Mapping[str, Any]:
            return regression_weights(
                w if self.fit_intercept else w[..., :-1], self.fit_intercept, data.dtype, outputs
            )

        progress = self._progress(self.max_iter, data.for_callbacks)
        l1, l2 = self.alpha * self.l1_ratio, self.alpha * (1 - self.l1_ratio) / 2
        step = CoordinateStep(
            l1, l2, self.fit_intercept, self.tol, data.dtype, FitReport(progress, attributes_of)
        )
        search: CoordinateSearch = iterate_fit(
            step, data, {"search": CoordinateSearch(start)}, self.max_iter, self.on
        ).search
        moments = in_range(self, search.moments)
        weights, history = search.coefficients(), search.history
        gaps = step.dual_gaps(search)
        if search.reason == TOO_MANY_COLUMNS:
            weights, history = self._descend(data, moments, weights, l1, l2, progress, attributes_of)
            gaps = np.full(len(gaps), np.nan)
        else:
            self._warn_unless_converged(search.reason, len(history), self.max_iter, self.tol)
        gap = gaps if outputs else float(gaps[0])
        self._set({**attributes_of(weights), "n_iter_": max(1, len(history)), "dual_gap_": gap})
        self._end_fit(progress, history)
        return self

    @property
    def sparse_coef_(self) -> csr_matrix:
        """`coef_` as a sparse matrix of SciPy, shape (1, features) or (outputs, features). Raises nothing."""
        return csr_matrix(self.coef_)

    def _descend(
        self,
        data: TrainingData,
        moments: ColumnMoments,
        start: Array,
        l1: float,
        l2: float,
        progress: Progress,
        attributes_of: Callable[[Array], Mapping[str, Any]],
    ) -> tuple[Array, list[Record]]:
        """Return the weights that OWL-QN finds, for any number of columns, and the records of its steps."""
        columns, targets = ColumnScaling(moments.means, moments.scales), target_scaling(moments)
        objective = LinearObjective(
            SquaredLoss(), l1=l1 / targets.scale, l2=l2, fit_intercept=self.fit_intercept
        )

        def weights_for_rows(w: Array) -> Array:
            w = targets.for_targets(columns.for_rows(w), self.fit_intercept)
            return w if self.fit_intercept else np.append(w, np.zeros((*w.shape[:-1], 1)), axis=-1)

        start = start if self.fit_intercept else start[:, :-1]
        result = self._minimize(
            OWLQN(self.max_iter, self.tol),
            StandardizedObjective(objective, columns),
            data.mapped(targets),
            columns.for_columns(targets.for_standardized(start, self.fit_intercept)).reshape(
                weights_of_zeros(data.outputs, data.num_features + self.fit_intercept).shape
            ),
            progress,
            lambda w: attributes_of(weights_for_rows(w)),
            loss_factor=targets.scale**2,
        )
        return weights_for_rows(result.w), result.history

    def _start(self, num_features: int, outputs: tuple[int, ...]) -> Array:
        """Return the first coefficients, shape (outputs, features).

        Raises ValueError if those of an earlier fit have another shape.
        """
        coef = weights_of_zeros(outputs, num_features)
        if self.warm_start and hasattr(self, "coef_"):
            self._check_warm_start(coef.shape, "outputs")
            coef[:] = self.coef_
        return np.atleast_2d(coef)
