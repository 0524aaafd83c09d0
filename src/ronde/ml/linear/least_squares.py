"""`LinearRegression` and `Ridge`: least squares, by the normal equations if there are few columns, else by L-BFGS.

The normal equations are summed over the rows of all tasks, and refined:

1. The first step sums what the means need, the second the matrix of second moments about the means. The eigenvalues of
   this matrix, with columns scaled to variance 1, say whether a column follows from others, whatever the units of the
   columns. If one does, the solution is the one with the least sum of squared coefficients, as of scikit-learn.
2. Each further step sums the gradient at the coefficients, and corrects them by its solution. So rounding errors of the
   matrix do not stay: a few steps reach the precision of a method that does not square the condition number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import MultiOutputMixin
from sklearn.utils._param_validation import Interval, StrOptions

from ronde.comqueue import IterationStep
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import FittedForm, KindForm
from ronde.ml.history import Progress
from ronde.ml.linear.column_scaling import (
    CHUNK,
    ColumnMoments,
    ColumnScaling,
    StandardizedObjective,
    column_moments,
    in_range,
    moments_of,
    rows_and_weights,
    target_scaling,
)
from ronde.ml.linear.linear_model import (
    FitReport,
    LinearModel,
    LinearRegressor,
    float_targets,
    regression_weights,
    weights_of_zeros,
)
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import LBFGS, LinearObjective
from ronde.ml.optimizers.optimizer import Record
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData, training_data

__all__ = ["LinearRegression", "Ridge"]

MOST_COLUMNS = 1000  # whose matrix of second moments is formed
MOST_STEPS = 1000
Array = NDArray[Any]

IDLE = 1e-9  # of the largest part of a column in such a direction: less is a rounding error
REFINEMENTS = 8  # at most
PRECISE = 1e-9  # relative to the largest coefficient: a smaller correction is the last
DEPENDENT = 1e-12  # of the variance of a scaled column: with less of it left, the column follows from others


class LinearRegression(MultiOutputMixin, LinearRegressor):
    """Least squares: the coefficients with the least sum over rows of weight * (prediction - y)^2.

        model = LinearRegression(on="local:2").fit(X, y)

    Args:
        fit_intercept: Whether there is an intercept.
        tol: With more than 1,000 columns, the largest component of the gradient at which the fit ends, for targets and
            the largest column with variance 1.
        max_iter: With more than 1,000 columns, the largest number of steps.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: Shape (features,), or (outputs, features) if y has two dimensions.
        intercept_: A number; shape (outputs,) if y has two dimensions; 0.0 without intercepts.
        n_iter_: The number of steps.
        history_: A `History` with `step` and `loss`, half the mean square.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "fit_intercept": ["boolean"],
        "tol": [Interval(Real, 0, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_iter: int = 1000,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.fit_intercept, self.tol, self.max_iter = fit_intercept, tol, max_iter
        self.on, self.verbose = on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix; or the path of Parquet files, a
                Spark data frame, or what `ronde.comqueue.read` returns.
            y: Shape (rows,) or (rows, outputs); or the name of a column of X.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together, or contain NaN or infinity.
            RemoteError: A task failed.
        """
        fit_squares(self, X, y, sample_weight, alpha=0.0, keeps_column=True)
        return self


class Ridge(MultiOutputMixin, LinearRegressor):
    """Least squares with a penalty: the sum over rows of weight * (prediction - y)^2, plus `alpha * |w|^2`.

        model = Ridge(alpha=10.0, on="local:2").fit(X, y)

    Args:
        alpha: The factor of the penalty. The intercept is not penalized.
        fit_intercept: Whether there is an intercept.
        tol: With more than 1,000 columns, the largest component of the gradient at which the fit ends, for targets and
            the largest column with variance 1.
        max_iter: With more than 1,000 columns, the largest number of steps (None: 1,000).
        solver: Has no effect: the solvers of scikit-learn, by whose names it goes ("auto"), find the same coefficients.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: Shape (features,), or (outputs, features) if y has several columns.
        intercept_: A number; shape (outputs,) if y has two dimensions; 0.0 without intercepts.
        n_iter_: The number of steps.
        solver_: The parameter `solver`; for "auto" the name of what this estimator does, "cholesky" for the normal
            equations or, with more than 1,000 columns, "lbfgs".
        history_: A `History` with `step` and `loss`, the objective divided by twice the sum of the weights.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "alpha": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "tol": [Interval(Real, 0, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "solver": [StrOptions({"auto", "svd", "cholesky", "lsqr", "sparse_cg", "sag", "saga", "lbfgs"})],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **LinearRegressor._fitted_forms,
        "solver_": KindForm(str, "a text"),
    }

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_iter: int | None = None,
        solver: str = "auto",
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.alpha, self.fit_intercept, self.tol, self.max_iter = alpha, fit_intercept, tol, max_iter
        self.solver = solver
        self.random_state, self.on, self.verbose = random_state, on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix; or the path of Parquet files, a
                Spark data frame, or what `ronde.comqueue.read` returns.
            y: Shape (rows,) or (rows, outputs); or the name of a column of X.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together, or contain NaN or infinity.
            RemoteError: A task failed.
        """
        fit_squares(self, X, y, sample_weight, self.alpha, keeps_column=False)
        used = "cholesky" if self.n_features_in_ <= MOST_COLUMNS else "lbfgs"
        self.solver_ = used if self.solver == "auto" else self.solver
        return self


def fit_squares(
    model: LinearModel, X: Any, y: Any, sample_weight: Any, alpha: float, keeps_column: bool
) -> None:
    """Set the fitted attributes: the minimum of the sum of weight * (prediction - y)^2, plus alpha * |w|^2.

    `keeps_column`: as of `regression_weights`.
    """
    data = training_data(model, X, y, sample_weight, accept_sparse="csr", y_numeric=True, multi_output=True)
    outputs, fit_intercept = data.outputs, model.fit_intercept
    data = data.mapped(float_targets)
    data.require_weight()

    def attributes_of(w: Array) -> Mapping[str, Any]:
        return regression_weights(w, fit_intercept, data.dtype, outputs, keeps_column)

    is_small = data.num_features <= MOST_COLUMNS
    progress = model._progress(None if is_small else model.max_iter or MOST_STEPS, data.for_callbacks)
    minimize = _solve_normal_equations if is_small else _descend
    weights, history = minimize(model, data, alpha, progress, attributes_of)
    model._set(attributes_of(weights))
    model.n_iter_ = len(history)
    model._end_fit(progress, history)


def _solve_normal_equations(
    model: LinearModel,
    data: TrainingData,
    alpha: float,
    progress: Progress,
    attributes_of: Callable[[Array], Mapping[str, Any]],
) -> tuple[Array, list[Record]]:
    """Return the weights, shape (outputs, columns), and the records of the steps. Raises ValueError, RemoteError."""
    step = _Refinement(alpha, model.fit_intercept, data.dtype, FitReport(progress, attributes_of))
    start: dict[str, Any] = {"moments": None, "matrix": None, "coef": None, "history": []}
    state = iterate_fit(step, data, start, 2 + REFINEMENTS, model.on)
    in_range(model, state.moments)
    return _weights(state, model.fit_intercept), state.history


def _descend(
    model: LinearModel,
    data: TrainingData,
    alpha: float,
    progress: Progress,
    attributes_of: Callable[[Array], Mapping[str, Any]],
) -> tuple[Array, list[Record]]:
    """Return the weights that L-BFGS finds, and the records of its steps.

    It starts from coefficients of 0, and all its steps are sums of centered rows. So if several solutions exist, it
    finds the one with the least sum of squared coefficients, as scikit-learn does.
    """
    moments, fit_intercept = moments_of(model, data), model.fit_intercept
    # With one divisor for all columns, the sum of squared coefficients has the same least solution.
    divisor = float(np.sqrt(moments.variances.max(initial=0.0))) or 1.0
    columns = ColumnScaling(moments.means, np.full(data.num_features, divisor))
    targets = target_scaling(moments)

    def weights_for_rows(w: Array) -> Array:
        return targets.for_targets(columns.for_rows(w), fit_intercept)

    result = model._minimize(
        LBFGS(model.max_iter or MOST_STEPS, model.tol),
        StandardizedObjective(
            LinearObjective(
                SquaredLoss(), l2=alpha / (2 * data.total_weight), fit_intercept=model.fit_intercept
            ),
            columns,
        ),
        data.mapped(targets),
        weights_of_zeros(data.outputs, data.num_features + fit_intercept),
        progress,
        lambda w: attributes_of(weights_for_rows(w)),
        loss_factor=targets.scale**2,
    )
    return weights_for_rows(result.w), result.history


def _weights(state: SimpleNamespace, fit_intercept: bool) -> Array:
    intercepts = state.moments.target_means - state.coef @ state.moments.means
    return np.hstack([state.coef, intercepts[:, None]]) if fit_intercept else np.asarray(state.coef)


class _Refinement:
    """The step of the iteration."""

    def __init__(self, alpha: float, fit_intercept: bool, dtype: np.dtype[Any], report: FitReport) -> None:
        self._alpha, self._fit_intercept, self._dtype, self._report = alpha, fit_intercept, dtype, report

    def __call__(self, c: IterationStep) -> None:
        state = c.state
        if state.moments is None:
            state.moments = column_moments(c, self._fit_intercept, self._dtype)
            state.coef = np.zeros(state.moments.products.shape)
            c.stop_if(not state.moments.are_in_range)
        elif state.matrix is None:
            varies = state.moments.variances > 0
            matrix = c.sum_blocks(lambda block: _moments(block, state.moments)) / state.moments.weight
            matrix = np.where(np.logical_and.outer(varies, varies), matrix, 0.0)
            state.matrix = matrix + self._alpha / state.moments.weight * np.eye(len(matrix))
        else:
            self._refine(c)

    def _refine(self, c: IterationStep) -> None:
        state, moments = c.state, c.state.moments
        loss, gradient = c.sum_blocks(lambda block: _loss_and_gradient(block, state.coef, moments))
        penalty = self._alpha / 2 * float(np.square(state.coef).sum())
        record = {"step": len(state.history) + 1, "loss": float(loss + penalty) / moments.weight}
        state.history.append(record)
        if not (math.isfinite(record["loss"]) and np.isfinite(state.matrix).all()):
            record["loss"] = math.inf  # squares overflow
            c.stop_if(True)
            return
        slope = np.where(moments.variances > 0, gradient + self._alpha * state.coef, 0.0) / moments.weight
        correction = _solve(state.matrix, slope.T).T
        state.coef = state.coef - correction
        changes, sizes = (np.abs(each * moments.scales).max(axis=1) for each in (correction, state.coef))
        is_precise = bool((changes <= PRECISE * sizes).all())
        should_stop = c.task_id == 0 and self._report(record, _weights(state, self._fit_intercept))
        c.stop_if(is_precise or should_stop)


def _centered(block: Any, moments: ColumnMoments) -> Iterator[tuple[Array, Array, Array]]:
    """Yield X and y minus their means, and the weights, for some rows at a time."""
    X, y, weights = rows_and_weights(block)
    size = max(1, CHUNK // X.shape[1])
    for begin in range(0, len(y), size):
        part = slice(begin, begin + size)
        rows = X[part] if isinstance(X, np.ndarray) else X[part].toarray()
        yield np.asarray(rows - moments.means, np.float64), y[part] - moments.target_means, weights[part]


def _moments(block: Any, moments: ColumnMoments) -> Array:
    total = np.zeros((len(moments.means), len(moments.means)))
    for X, _, weights in _centered(block, moments):
        total += X.T @ (X * weights[:, None])
    return total


def _loss_and_gradient(block: Any, coef: Array, moments: ColumnMoments) -> tuple[float, Array]:
    """Return half the sum of squares, and its gradient by the coefficients."""
    loss, gradient = 0.0, np.zeros(coef.shape)
    for X, y, weights in _centered(block, moments):
        rest = X @ coef.T - y
        weighted = rest * weights[:, None]
        loss += float((rest * weighted).sum()) / 2
        gradient += weighted.T @ X
    return loss, gradient


def _solve(matrix: Array, right: Array) -> Array:
    """Return the solution of a positive semidefinite system; the one of least norm if there are several.

    Columns of zeros get 0.
    """
    solution = np.zeros(right.shape)
    varies = np.flatnonzero(np.diagonal(matrix) > 0)
    scales = np.sqrt(np.diagonal(matrix)[varies])
    values, vectors = np.linalg.eigh(matrix[np.ix_(varies, varies)] / np.outer(scales, scales))
    kept = values > DEPENDENT
    basis = vectors[:, kept] / scales[:, None]
    found = basis @ ((basis.T @ right[varies]) / values[kept, None])
    if not kept.all():  # take away what changes no prediction
        idle = vectors[:, ~kept]
        idle = np.where(
            np.abs(idle) > IDLE, idle, 0.0
        )  # else a small scale would make much of rounding errors
        idle, _ = np.linalg.qr(idle / scales[:, None])
        found -= idle @ (idle.T @ found)
    solution[varies] = found
    return solution
