"""Least squares with few columns: the normal equations, summed over the rows of all tasks, and refined.

1. The first step sums what the means need, the second the matrix of second moments about the means. The eigenvalues of
   this matrix, with columns scaled to variance 1, say whether a column follows from others, whatever the units of the
   columns. If one does, the solution is the one with the least sum of squared coefficients, as of scikit-learn.
2. Each further step sums the gradient at the coefficients, and corrects them by its solution. So rounding errors of the
   matrix do not stay: a few steps reach the precision of a method that does not square the condition number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.linear.column_moments import CHUNK, ColumnMoments, column_moments, rows_and_weights
from ronde.ml.linear.linear_model import FitReport
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData

__all__ = ["least_squares"]

Array = NDArray[Any]

IDLE = 1e-9  # of the largest part of a column in such a direction: less is a rounding error
REFINEMENTS = 8  # at most
PRECISE = 1e-9  # relative to the largest coefficient: a smaller correction is the last
DEPENDENT = 1e-12  # of the variance of a scaled column: with less of it left, the column follows from others


def least_squares(
    data: TrainingData, alpha: float, fit_intercept: bool, on: Any, report: FitReport
) -> SimpleNamespace:
    """Return `weights`, the coefficients of each output, with the intercept as last column if there is one, and
    `history`, the records of the steps; and `moments`, which may be out of range.

    The weights minimize the sum over rows of weight * (X w + b - y)^2, plus alpha * |w|^2. `report`: gets the record of
    each step, and the weights.
    """
    state = iterate_fit(
        _Refinement(alpha, fit_intercept, data.dtype, report),
        data,
        {"moments": None, "matrix": None, "coef": None, "history": []},
        2 + REFINEMENTS,
        on,
    )
    return SimpleNamespace(
        weights=_weights(state, fit_intercept), history=state.history, moments=state.moments
    )


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
