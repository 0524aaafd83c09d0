"""`ElasticNet` and `Lasso`: least squares with a penalty on absolute values, by coordinate descent on few columns.

The columns with a coefficient other than 0, and those where the gradient exceeds the penalty, are the *working set*.
Its matrix of second moments, summed over the rows of all tasks, and the gradient at the present coefficients are all
that coordinate descent needs: it never reads rows. A step

1. adds the columns with the largest excess to the working set, at most as many as have a coefficient, and sums their
   moments;
2. minimizes over the working set by coordinate descent, in native code;
3. sums loss and gradient at the new coefficients, for all columns. The next step starts from this gradient, so rounding
   errors of the matrix do not stay.

The fit ends when no column violates the conditions of the minimum, as in R. Tibshirani and others, Strong rules for
discarding predictors in lasso-type problems, J. R. Stat. Soc. B 74 (2012), section 7. Coordinate descent on moments is
from J. Friedman, T. Hastie and R. Tibshirani, Regularization paths for generalized linear models via coordinate
descent, J. Stat. Softw. 33 (2010), section 2.2.

All of it is in terms of columns and targets with variance 1, so neither units of X nor of y matter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import MultiOutputMixin
from sklearn.utils._param_validation import Interval

from ronde._native import descend_coordinates
from ronde.comqueue import IterationStep
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import ArrayForm, FittedForm
from ronde.ml.history import Progress
from ronde.ml.linear.column_scaling import (
    CHUNK,
    ColumnMoments,
    ColumnScaling,
    StandardizedObjective,
    column_moments,
    in_range,
    rows_and_weights,
    target_scaling,
)
from ronde.ml.linear.linear_model import (
    FitReport,
    LinearRegressor,
    float_targets,
    regression_weights,
    weights_of_zeros,
)
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import OWLQN, LinearObjective
from ronde.ml.optimizers.descent import pseudo_gradient
from ronde.ml.optimizers.objective import transposed
from ronde.ml.optimizers.optimizer import Record
from ronde.ml.source_data import is_sparse
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData, training_data

__all__ = ["ElasticNet", "Lasso"]

Array = NDArray[Any]

TOO_MANY_COLUMNS = "too many columns"  # the reason if the working set would become larger than MOST_COLUMNS
MOST_COLUMNS = 1000  # whose matrix of second moments is formed
FEW_COLUMNS = 100  # may all join the working set at once
FIRST_COLUMNS = 40  # of more columns, may join the working set in any step
INNER_TOLERANCE = 0.3  # of that of the fit
INNER_PROGRESS = 1e-5  # part of a violation that a step need not remove from the working set
PASSES, ROUNDS = 100, 20  # of coordinate descent in a step: passes between moves within an orthant
MOVES = 10  # in a row
FLAT = 1e-12  # part of the largest curvature: with less, a direction has none
PATIENCE = 3  # steps in a row without progress, after which only rounding errors are left


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


class Lasso(ElasticNet):
    """Least squares with a penalty that makes coefficients exactly 0.

        mean over rows of (prediction - y)^2 / 2  +  alpha * |w|_1

    It is `ElasticNet` with `l1_ratio=1`. The mean is a weighted one.

    Args:
        alpha: The factor of the penalty. The intercept is not penalized.
        fit_intercept: Whether there is an intercept.
        max_iter: The largest number of steps.
        tol: As of `ElasticNet`.
        warm_start: Whether a second fit starts from the coefficients of the first. Both need the same number of
            outputs and columns.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: As of `ElasticNet`.
        intercept_: As of `ElasticNet`.
        n_iter_: The number of steps.
        dual_gap_: As of `ElasticNet`.
        history_: As of `ElasticNet`.
    """

    _parameter_constraints: ClassVar = {
        name: constraints
        for name, constraints in ElasticNet._parameter_constraints.items()
        if name != "l1_ratio"
    }

    l1_ratio = 1.0  # no parameter here

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-6,
        warm_start: bool = False,
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.max_iter, self.tol, self.warm_start = max_iter, tol, warm_start
        self.random_state, self.on, self.verbose = random_state, on, verbose


# The step


@dataclass
class CoordinateSearch:
    """Where the steps are; the same on all tasks.

    Attributes:
        w: The coefficients of columns and targets with variance 1, shape (outputs, features); at first those of the
            user's columns.
        moments: Of the columns; None before the first step.
        gradient: Of all but the penalty on absolute values.
        columns: The working set, in the order in which columns joined it.
        matrix: Its second moments.
        history: The records of all steps.
        reason: Why the fit has ended, as of `OptimizerResult`; None while it goes on.
    """

    w: Array
    moments: ColumnMoments | None = None
    gradient: Array | None = None
    losses: Array | None = None
    columns: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    matrix: Array = field(default_factory=lambda: np.zeros((0, 0)))
    history: list[Record] = field(default_factory=list)
    reason: str | None = None
    least_violation: float = np.inf
    idle_steps: int = 0

    def coefficients(self) -> Array:
        """Return the coefficients of the user's columns and targets, with the intercepts as last column."""
        assert self.moments is not None
        coef = self.w / self.moments.scales * self.moments.target_scales[:, None]
        intercepts = self.moments.target_means - coef @ self.moments.means
        return np.hstack([coef, intercepts[:, None]])


class CoordinateStep:
    """The step of the iteration.

    Args:
        l1: The factor of the sum of absolute values.
        l2: The factor of the sum of squares.
        fit_intercept: Whether there is an intercept.
        tol: The largest component of the least subgradient at which it ends.
        dtype: Of X.
        report: Gets the record of each step and the coefficients, on task 0; returns whether the fit shall end.
    """

    def __init__(
        self,
        l1: float,
        l2: float,
        fit_intercept: bool,
        tol: float,
        dtype: np.dtype[Any],
        report: Callable[[Mapping[str, float], Array], bool],
    ) -> None:
        self._l1, self._l2, self._fit_intercept, self._tol = l1, l2, fit_intercept, tol
        self._dtype, self._report = dtype, report

    def __call__(self, c: IterationStep) -> None:
        search: CoordinateSearch = c.state.search
        if search.moments is None:
            search.moments = column_moments(c, self._fit_intercept, self._dtype, with_products=True)
            if not search.moments.are_in_range:
                c.stop_if(True)
                return
            search.w = np.where(
                search.moments.variances > 0,
                search.w * search.moments.scales / search.moments.target_scales[:, None],
                0.0,
            )
            self._evaluate(c, search)
        added = self._new_columns(search)
        if search.reason is None:
            self._extend(c, search, added)
            is_solved = self._minimize(search)
            self._evaluate(c, search)
            self._record(search, is_idle=is_solved and not added.size)
            if c.task_id == 0 and self._report(search.history[-1], search.coefficients()):
                search.reason = search.reason or "report"
        c.stop_if(search.reason is not None)

    def dual_gaps(self, search: CoordinateSearch) -> Array:
        """Return how far the objective of each output is from its minimum at most, shape (outputs,).

        It is the objective less that of the dual problem, at the residuals times the largest factor at which they
        fulfil its constraints; see S.-J. Kim and others, An interior-point method for large-scale l1-regularized least
        squares, IEEE J. Sel. Top. Signal Process. 1 (2007), section III.A.
        """
        assert search.moments is not None
        assert search.losses is not None
        assert search.gradient is not None
        penalties, curvatures = self._penalties(search), self._curvatures(search)
        sizes = np.abs(search.gradient)
        factors = np.divide(penalties, sizes, out=np.ones_like(sizes), where=sizes > penalties).min(axis=1)
        squares = (curvatures * np.square(search.w)).sum(axis=1)
        # Of residuals by targets.
        products = 2 * search.losses - (search.w * search.gradient).sum(axis=1) + squares
        gaps = (2 * search.losses + squares) * (1 + np.square(factors)) / 2 - factors * products
        gaps += (penalties * np.abs(search.w)).sum(axis=1)
        return np.asarray(np.square(search.moments.target_scales) * np.maximum(gaps, 0.0))

    def _penalties(self, search: CoordinateSearch) -> Array:
        """Return the factor of each absolute value, shape (outputs, features)."""
        assert search.moments is not None
        return np.asarray(self._l1 / (search.moments.target_scales[:, None] * search.moments.scales))

    def _curvatures(self, search: CoordinateSearch) -> Array:
        """Return the second derivatives of the penalty on squares."""
        assert search.moments is not None
        return np.asarray(2 * self._l2 / np.square(search.moments.scales))

    def _violations(self, search: CoordinateSearch) -> Array:
        assert search.gradient is not None
        return np.abs(pseudo_gradient(search.w, search.gradient, self._penalties(search)))

    def _new_columns(self, search: CoordinateSearch) -> NDArray[np.intp]:
        """Return what joins the working set; or set the reason why there is no step."""
        violations = self._violations(search).max(axis=0)
        if violations.max(initial=0.0) <= self._tol:
            search.reason = "gradient"
        violations[search.columns] = 0.0
        violating = np.flatnonzero(violations > self._tol)
        present = np.flatnonzero(search.w.any(axis=0))
        largest_first = violating[np.argsort(-violations[violating], kind="stable")]
        most = max(FIRST_COLUMNS, len(present)) if len(violations) > FEW_COLUMNS else FEW_COLUMNS
        added = np.sort(largest_first[:most])
        if len(search.columns) + len(added) > MOST_COLUMNS:
            kept = np.flatnonzero(np.isin(search.columns, present))
            search.columns, search.matrix = search.columns[kept], search.matrix[np.ix_(kept, kept)]
        if len(present) + len(added) > MOST_COLUMNS:
            search.reason = search.reason or TOO_MANY_COLUMNS
        return added

    def _extend(self, c: IterationStep, search: CoordinateSearch, added: NDArray[np.intp]) -> None:
        """Add columns to the working set. Those whose coefficients are not 0 violate nothing, but belong to it."""
        assert search.moments is not None
        missing = np.setdiff1d(np.flatnonzero(search.w.any(axis=0)), search.columns)
        added = np.union1d(added, missing)
        if not added.size:
            return
        moments, old = search.moments, len(search.columns)
        search.columns = np.concatenate([search.columns, added])
        means, scales = moments.means[search.columns], moments.scales[search.columns]
        sums = c.sum_blocks(lambda block: _second_moments(block, search.columns, means, scales, old))
        matrix = np.empty((len(search.columns), len(search.columns)))
        matrix[:old, :old] = search.matrix
        matrix[:, old:] = sums / moments.weight
        matrix[old:] = matrix[:, old:].T
        search.matrix = matrix

    def _minimize(self, search: CoordinateSearch) -> bool:
        """Minimize over the working set; return whether that has come to its end."""
        assert search.gradient is not None
        columns, largest = search.columns, float(self._violations(search).max())
        tolerance = max(INNER_TOLERANCE * self._tol, INNER_PROGRESS * largest)
        matrix = search.matrix + np.diag(self._curvatures(search)[columns])
        penalties, are_solved = self._penalties(search), []
        for output, gradient in enumerate(search.gradient):
            w = search.w[output, columns]
            are_solved.append(
                minimize_quadratic(matrix, penalties[output, columns], gradient[columns], w, tolerance)
            )
            search.w[output, columns] = w
        return all(are_solved)

    def _evaluate(self, c: IterationStep, search: CoordinateSearch) -> None:
        """Set losses and gradient at the present coefficients. At 0, the moments say them."""
        moments = search.moments
        assert moments is not None
        targets = moments.target_scales[:, None]
        if search.w.any():
            losses, gradient, totals = c.sum_blocks(_Residuals(search.w, moments).sums)
            gradient = (gradient - totals[:, None] * moments.means) / moments.scales / moments.weight
            search.losses = losses / moments.weight
        else:
            search.losses = moments.target_variances / np.square(moments.target_scales) / 2
            gradient = -moments.products / moments.scales / targets
        search.gradient = np.where(moments.variances > 0, gradient + self._curvatures(search) * search.w, 0.0)

    def _record(self, search: CoordinateSearch, is_idle: bool) -> None:
        """Add the record of a step, and decide whether it was the last one."""
        assert search.moments is not None
        assert search.losses is not None
        squares = np.square(search.moments.target_scales)
        penalties = (self._penalties(search) * np.abs(search.w)).sum(axis=1)
        penalties += (self._curvatures(search) / 2 * np.square(search.w)).sum(axis=1)
        violation = float(self._violations(search).max(initial=0.0))
        loss = float(squares @ (search.losses + penalties))
        search.history.append({"step": len(search.history) + 1, "loss": loss, "gradient_norm": violation})
        has_progress = violation < search.least_violation / 2 or not is_idle
        search.idle_steps = 0 if has_progress else search.idle_steps + 1
        search.least_violation = min(violation, search.least_violation)
        if violation <= self._tol:
            search.reason = "gradient"
        elif search.idle_steps == PATIENCE:
            search.reason = "precision"


def minimize_quadratic(matrix: Array, penalties: Array, gradient: Array, w: Array, tolerance: float) -> bool:
    """Minimize w'Aw/2 + b'w + sum of penalties * |w|, where `gradient` is Aw + b; both change in place.

    Return whether no component of the least subgradient is larger than the tolerance. Coordinate descent finds soon
    which coefficients are 0, but strongly correlated columns take many passes. So after some passes all coefficients
    move to the minimum for their signs, or until the first of them is 0.
    """
    for _ in range(ROUNDS):
        if descend_coordinates(matrix, penalties, gradient, w, tolerance, PASSES) < PASSES:
            return True
        for _ in range(MOVES):
            if not _move_in_orthant(matrix, penalties, gradient, w):
                break
    return False


def _move_in_orthant(matrix: Array, penalties: Array, gradient: Array, w: Array) -> bool:
    """Move to the minimum for the present signs; return whether that ended early, because a coefficient became 0.

    In a direction without curvature the penalty falls until this happens.
    """
    present = np.flatnonzero(w)
    if not present.size:
        return False
    values, slopes = w[present], gradient[present] + penalties[present] * np.sign(w[present])
    curvatures, vectors = np.linalg.eigh(matrix[np.ix_(present, present)])
    along = vectors.T @ slopes
    is_flat = curvatures <= FLAT * curvatures[-1]
    if np.abs(along[is_flat]).max(initial=0.0) > FLAT * np.abs(along).max():
        move, most = -vectors[:, is_flat] @ along[is_flat], np.inf
    else:
        move, most = -vectors[:, ~is_flat] @ (along[~is_flat] / curvatures[~is_flat]), 1.0
    lengths = np.divide(-values, move, out=np.full(len(values), np.inf), where=values * move < 0)
    length = min(most, float(lengths.min()))
    if not (np.vdot(slopes, move) < 0 and np.isfinite(length)):
        return False
    w[present] = np.where(lengths <= length, 0.0, values + length * move)
    gradient += matrix[:, present] @ (w[present] - values)
    return length < most


def _second_moments(block: Any, columns: NDArray[np.intp], means: Array, scales: Array, old: int) -> Array:
    """Return the sums of products of the working set with its columns from `old` on, with variance 1."""
    X, _, weights = rows_and_weights(block)
    total = np.zeros((len(columns), len(columns) - old))
    size = max(1, CHUNK // len(columns))
    chosen = X[:, columns] if is_sparse(X) else X
    for begin in range(0, len(weights), size):
        part = slice(begin, begin + size)
        rows = chosen[part].toarray() if is_sparse(X) else X[part][:, columns]
        rows = (rows - means) / scales
        total += rows.T @ (rows[:, old:] * weights[part, None])
    return total


class _Residuals:
    """What a function of a block computes from the residuals at some coefficients."""

    def __init__(self, w: Array, moments: ColumnMoments) -> None:
        self._factors = w / moments.scales
        self._present = np.flatnonzero(w.any(axis=0))
        self._offsets = self._factors @ moments.means
        self._target_means, self._target_scales = moments.target_means, moments.target_scales

    def sums(self, block: Any) -> tuple[Array, Array, Array]:
        """Return half the sum of squares of each output; its gradient by coefficients of X; the sum of residuals."""
        X, y, weights = rows_and_weights(block)
        y = (y - self._target_means) / self._target_scales + self._offsets
        losses, totals = np.zeros(len(self._offsets)), np.zeros(len(self._offsets))
        gradient = np.zeros(self._factors.shape)
        size = len(y) if is_sparse(X) else max(1, CHUNK // X.shape[1])
        for begin in range(0, len(y), size):
            part = slice(begin, begin + size)
            rest = self._scores(X[part]) - y[part]
            weighted = rest * weights[part, None]
            losses += (rest * weighted).sum(axis=0) / 2
            gradient += (
                (transposed(X) @ weighted).T
                if is_sparse(X)
                else weighted.T @ X[part].astype(np.float64, copy=False)
            )
            totals += weighted.sum(axis=0)
        return losses, gradient, totals

    def _scores(self, rows: Any) -> Array:
        if is_sparse(rows) or 2 * len(self._present) > rows.shape[1]:
            return np.asarray(rows @ self._factors.T)
        chosen = rows[:, self._present].astype(np.float64, copy=False)
        return np.asarray(chosen @ self._factors[:, self._present].T)
