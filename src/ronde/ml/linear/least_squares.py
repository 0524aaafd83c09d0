"""Least squares with few columns: the normal equations, summed over the rows of all tasks, and refined.

1. The first step sums what the means need, the second the matrix of second moments about the means. The eigenvalues of
   this matrix, with columns scaled to variance 1, say whether a column follows from others. If one does, the solution
   is the one with the least sum of squared coefficients, as of scikit-learn.
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

from ronde.comqueue import IterationStep, iterate
from ronde.ml.linear.linear_model import FitReport
from ronde.ml.tasks import SingleThreadedStep, place_of
from ronde.ml.training_data import TrainingData

__all__ = ["least_squares", "row_means"]

Array = NDArray[Any]

REFINEMENTS = 8  # at most
PRECISE = 1e-9  # relative to the largest coefficient: a smaller correction is the last
DEPENDENT = 1e-12  # of the variance of a scaled column: with less of it left, the column follows from others
CHUNK = 1 << 17  # numbers of X that are centered at a time


def least_squares(
    data: TrainingData, alpha: float, fit_intercept: bool, on: Any, report: FitReport
) -> SimpleNamespace:
    """Return `weights`, the coefficients of each output, with the intercept as last column if there is one, and
    `history`, the records of the steps.

    The weights minimize the sum over rows of weight * (X w + b - y)^2, plus alpha * |w|^2. `report`: gets the record of
    each step, and the weights.
    """
    state = iterate(
        SingleThreadedStep(_Refinement(alpha, fit_intercept, report)),
        data=data.rows,
        state={"means": None, "matrix": None, "coef": None, "history": []},
        max_iter=2 + REFINEMENTS,
        on=place_of(on, data.size),
    ).state
    return SimpleNamespace(weights=_weights(state, fit_intercept), history=state.history)


def _weights(state: SimpleNamespace, fit_intercept: bool) -> Array:
    intercepts = state.means.y - state.coef @ state.means.X
    return np.hstack([state.coef, intercepts[:, None]]) if fit_intercept else np.asarray(state.coef)


class _Refinement:
    """The step of the iteration."""

    def __init__(self, alpha: float, fit_intercept: bool, report: FitReport) -> None:
        self._alpha, self._fit_intercept, self._report = alpha, fit_intercept, report

    def __call__(self, c: IterationStep) -> None:
        state = c.state
        if state.means is None:
            state.means = row_means(c, self._fit_intercept)
            state.coef = np.zeros((len(state.means.y), len(state.means.X)))
        elif state.matrix is None:
            matrix = c.sum_blocks(lambda block: _moments(block, state.means)) / state.means.weight
            state.matrix = matrix + self._alpha / state.means.weight * np.eye(len(matrix))
        else:
            self._refine(c)

    def _refine(self, c: IterationStep) -> None:
        state = c.state
        loss, gradient = c.sum_blocks(lambda block: _loss_and_gradient(block, state.coef, state.means))
        penalty = self._alpha / 2 * float(np.square(state.coef).sum())
        record = {"step": len(state.history) + 1, "loss": float(loss + penalty) / state.means.weight}
        state.history.append(record)
        if not (math.isfinite(record["loss"]) and np.isfinite(state.matrix).all()):
            record["loss"] = math.inf  # squares overflow
            c.stop_if(True)
            return
        slope = (gradient + self._alpha * state.coef) / state.means.weight
        correction = _solve(state.matrix, slope.T).T
        state.coef = state.coef - correction
        is_precise = np.abs(correction).max(initial=0.0) <= PRECISE * np.abs(state.coef).max(initial=0.0)
        should_stop = c.task_id == 0 and self._report(record, _weights(state, self._fit_intercept))
        c.stop_if(is_precise or should_stop)


def row_means(c: IterationStep, fit_intercept: bool) -> SimpleNamespace:
    """Return `X` and `y`, the means of their columns, or zeros without an intercept; and `weight`, that of all rows.

    All tasks call it.
    """

    def sums(block: Any) -> dict[str, Any]:
        X, y, weights = _parts(block)
        return {"X": np.asarray(X.T @ weights, np.float64), "y": y.T @ weights, "weight": weights.sum()}

    total = c.sum_blocks(sums)
    factor = fit_intercept / total["weight"]
    return SimpleNamespace(X=total["X"] * factor, y=total["y"] * factor, weight=float(total["weight"]))


def _parts(block: Any) -> tuple[Any, Array, Array]:
    """Return X, y of shape (rows, outputs), and the weights."""
    y = block.y.reshape(len(block.y), -1)
    weights = getattr(block, "sample_weight", None)
    return block.X, y, np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)


def _centered(block: Any, means: SimpleNamespace) -> Iterator[tuple[Array, Array, Array]]:
    """Yield X and y minus their means, and the weights, for some rows at a time."""
    X, y, weights = _parts(block)
    size = max(1, CHUNK // X.shape[1])
    for begin in range(0, len(y), size):
        part = slice(begin, begin + size)
        rows = X[part] if isinstance(X, np.ndarray) else X[part].toarray()
        yield np.asarray(rows - means.X, np.float64), y[part] - means.y, weights[part]


def _moments(block: Any, means: SimpleNamespace) -> Array:
    total = np.zeros((len(means.X), len(means.X)))
    for X, _, weights in _centered(block, means):
        total += X.T @ (X * weights[:, None])
    return total


def _loss_and_gradient(block: Any, coef: Array, means: SimpleNamespace) -> tuple[float, Array]:
    """Return half the sum of squares, and its gradient by the coefficients."""
    loss, gradient = 0.0, np.zeros(coef.shape)
    for X, y, weights in _centered(block, means):
        rest = X @ coef.T - y
        weighted = rest * weights[:, None]
        loss += float((rest * weighted).sum()) / 2
        gradient += weighted.T @ X
    return loss, gradient


def _solve(matrix: Array, right: Array) -> Array:
    """Return the solution of a positive semidefinite system; the one of least norm if there are several."""
    scales = np.sqrt(np.diagonal(matrix)).copy()
    scales[scales == 0] = 1
    values, vectors = np.linalg.eigh(matrix / np.outer(scales, scales))
    if values[0] > DEPENDENT:
        solution = vectors @ ((vectors.T @ (right / scales[:, None])) / values[:, None]) / scales[:, None]
        return np.asarray(solution)
    values, vectors = np.linalg.eigh(matrix)
    kept = values > DEPENDENT * values[-1]
    basis = vectors[:, kept]
    return np.asarray(basis @ ((basis.T @ right) / values[kept, None]))
