"""Columns and targets with mean 0 and variance 1, without a copy of X: weights are converted in place of rows.

The score of a row is the same for `w` and the standardized columns as for `scaling.for_rows(w)` and X. So sparse rows
stay sparse, a fit takes as many steps as if the columns were of one scale and centered, and a tolerance has the same
meaning whatever the units of y.

Deviations are summed from a point near the mean, the mean of the first rows, so that a large mean costs no digits. A
column is constant if its deviations are rounding errors: if its standard deviation is at most `ROUNDING` units in the
last place of its mean. No fit divides by such a deviation, and the coefficient of the column is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.base import overflow_message, vanishing_message
from ronde.ml.optimizers import LinearObjective, Objective
from ronde.ml.optimizers.objective import transposed
from ronde.ml.source_data import is_sparse
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData

__all__ = [
    "CHUNK",
    "ColumnMoments",
    "ColumnScaling",
    "StandardizedObjective",
    "column_moments",
    "curvature_scaling",
    "in_range",
    "moments_of",
    "rows_and_weights",
    "target_scaling",
]

Array = NDArray[Any]

ROUNDING = 4  # units in the last place
CHUNK = 1 << 18  # numbers of X whose deviations are formed at a time
LEAST_SQUARES = 1e-290  # sums of squares below have lost digits


@dataclass(frozen=True)
class ColumnScaling:
    """Means and scales of the columns. Weights may have one column more, the intercept."""

    means: Array
    scales: Array

    def for_rows(self, w: Array) -> Array:
        """Return the weights for X that give the scores of `w` for the standardized columns."""
        result, features = w.copy(), len(self.scales)
        result[..., :features] /= self.scales
        result[..., features:] -= (result[..., :features] @ self.means)[..., None]
        return result

    def for_columns(self, w: Array) -> Array:
        """Return the inverse of `for_rows`."""
        result, features = w.copy(), len(self.scales)
        result[..., features:] += (w[..., :features] @ self.means)[..., None]
        result[..., :features] *= self.scales
        return result

    def gradient(self, gradient: Array) -> Array:
        """Return the gradient by weights of the standardized columns, from that by weights for X."""
        result, features = gradient.copy(), len(self.scales)
        if gradient.shape[-1] > features:
            result[..., :features] -= gradient[..., features:] * self.means
        result[..., :features] /= self.scales
        return result


def curvature_scaling(model: Any, data: TrainingData, l2: float, curvature: float) -> ColumnScaling:
    """Return what centers the columns of X, with scales that make the second derivatives alike.

    These are at most `curvature` times the variance, from the loss, plus 2 * `l2`, from the penalty. `model` and
    errors: as of `moments_of`.
    """
    moments = moments_of(model, data)
    squares = moments.variances + 2 * l2 / curvature
    return ColumnScaling(moments.means, np.sqrt(np.where(squares > 0, squares, 1.0)))


def moments_of(model: Any, data: TrainingData) -> ColumnMoments:
    """Read all rows once; return the moments of the columns. `model`: the estimator.

    Raises ValueError if squares overflow or vanish, or no row has a weight, and RemoteError.
    """
    data.require_weight()
    step = _MomentsStep(model.fit_intercept, data.dtype)
    on = None if isinstance(data.rows, Mapping) else model.on
    moments: ColumnMoments = iterate_fit(step, data, {"moments": None}, 1, on).moments
    return in_range(model, moments)


def in_range(model: Any, moments: ColumnMoments | None) -> ColumnMoments:
    """Return the moments. Raises ValueError if squares overflow or vanish."""
    assert moments is not None
    if moments.overflow:
        raise ValueError(overflow_message(type(model).__name__, math.inf, 1))
    if moments.vanish:
        raise ValueError(vanishing_message(type(model).__name__))
    return moments


@dataclass(frozen=True)
class _MomentsStep:
    fit_intercept: bool
    dtype: np.dtype[Any]

    def __call__(self, c: IterationStep) -> None:
        c.state.moments = column_moments(c, self.fit_intercept, self.dtype)


@dataclass(frozen=True)
class TargetScaling:
    """Standardizes the targets in the parts of some rows: `data.mapped(scaling)`.

    Attributes:
        means: Of the outputs; 0 without intercepts.
        scale: The divisor of all outputs.
    """

    means: Array
    scale: float

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        y = parts["y"]
        means = self.means if y.ndim > 1 else self.means[0]
        return {**parts, "y": (y - means) / self.scale}

    def for_targets(self, w: Array, fit_intercept: bool) -> Array:
        """Return the weights for y, from those for standardized targets. The last column is the intercept."""
        result = w * self.scale
        if fit_intercept:
            result[..., -1] += self.means.reshape(w.shape[:-1])
        return result

    def for_standardized(self, w: Array, fit_intercept: bool) -> Array:
        """Return the inverse of `for_targets`."""
        result = w.copy()
        if fit_intercept:
            result[..., -1] -= self.means.reshape(w.shape[:-1])
        result /= self.scale
        return result


def target_scaling(moments: ColumnMoments) -> TargetScaling:
    """Return what centers each output, and divides all by the largest standard deviation of one."""
    scale = float(np.sqrt(moments.target_variances.max())) or 1.0
    return TargetScaling(moments.target_means, scale)


class StandardizedObjective(Objective):
    """The same function of other weights: those of standardized columns. Penalties are on the weights for X.

    Args:
        objective: The function of the weights for X.
        scaling: Means and scales of the columns.
        most_factor: `tol` limits the gradient by weights of standardized columns (1); above 1, that by weights for X of
            columns with larger scales, as far as it is larger by no more than this factor.
    """

    def __init__(self, objective: LinearObjective, scaling: ColumnScaling, most_factor: float = 1.0) -> None:
        self._objective, self._scaling = objective, scaling
        self._tol_factors = np.clip(scaling.scales, 1.0, most_factor)
        self.l1, self.l2 = objective.l1, objective.l2
        self._factors: Array | None = None
        self._last: tuple[Array, Array] | None = None

    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        loss, gradient = self._objective.loss_and_gradient(block, self._for_rows(w))
        return loss, self._scaling.gradient(gradient)

    def losses(self, block: Any, points: Array) -> Array:
        return self._objective.losses(block, self._for_rows(points))

    def total_weight(self, block: Any) -> float:
        return self._objective.total_weight(block)

    def penalty_factors(self, w: Array) -> Array:
        if self._factors is None or self._factors.shape != w.shape:  # asked for several times in each step
            self._factors = self._objective.penalty_factors(w)
            self._factors[..., : len(self._scaling.scales)] /= self._scaling.scales
        return self._factors

    def gradient_norm(self, gradient: Array) -> float:
        counted = np.abs(gradient)
        counted[..., : len(self._tol_factors)] *= self._tol_factors
        return float(counted.max(initial=0.0))

    def hessian(self, block: Any, w: Array) -> Array:
        by_rows = self._objective.hessian(block, self._for_rows(w)).reshape(w.shape * 2)
        half = self._scaling.gradient(by_rows)  # by the second w; now by the first
        other = self._scaling.gradient(np.moveaxis(half, w.ndim - 1, -1))
        return np.moveaxis(other, -1, w.ndim - 1).reshape(w.size, w.size)

    def hessian_product(self, block: Any, w: Array, direction: Array) -> Array:
        along = self._scaling.for_rows(direction)
        return self._scaling.gradient(self._objective.hessian_product(block, self._for_rows(w), along))

    def _for_rows(self, w: Array) -> Array:
        """Return the weights for X, for all blocks the same array."""
        if self._last is None or self._last[0] is not w:
            self._last = (w, self._scaling.for_rows(w))
        return self._last[1]


@dataclass(frozen=True)
class ColumnMoments:
    """Weighted moments of the columns; without an intercept, about 0 instead of the means, which are then 0.

    Attributes:
        weight: The sum of the weights of all rows.
        means: Of the columns of X.
        variances: Of the columns of X; 0 for constant ones.
        target_means: Of the columns of y.
        target_variances: Of the columns of y.
        products: The mean products of deviations, shape (outputs, features): a gradient, but for its sign. 0 if they
            were not asked for.
        overflow: Whether sums of squares do. Then nothing else counts.
        vanish: Whether squares do. Then nothing else counts.
    """

    weight: float
    means: Array
    variances: Array
    target_means: Array
    target_variances: Array
    products: Array
    overflow: bool
    vanish: bool

    @property
    def are_in_range(self) -> bool:
        """Whether squares neither overflow nor vanish."""
        return not (self.overflow or self.vanish)

    @functools.cached_property
    def scales(self) -> Array:
        """The standard deviations of the columns of X; 1 for constant ones."""
        return _scales(self.variances)

    @functools.cached_property
    def target_scales(self) -> Array:
        """The standard deviations of the columns of y; 1 for constant ones."""
        return _scales(self.target_variances)


def _scales(variances: Array) -> Array:
    return np.sqrt(np.where(variances > 0, variances, 1.0))


def column_moments(
    c: IterationStep, fit_intercept: bool, dtype: np.dtype[Any], with_products: bool = False
) -> ColumnMoments:
    """Return the moments of all rows, of which some have weights. All tasks call it. `dtype`: of X."""
    with np.errstate(over="ignore", invalid="ignore"):
        x_shift, y_shift = _first_means(c, fit_intercept)
        sums = c.sum_blocks(lambda block: _sums(block, x_shift, y_shift, with_products))
        weight = float(sums["weight"])
        means, target_means = sums["X"] / weight, sums["y"] / weight
        variances, target_variances = sums["XX"] / weight, sums["yy"] / weight
        products = sums["yX"] / weight if with_products else np.zeros((len(target_means), len(means)))
        squares = float(variances.sum() + target_variances.sum())
        if fit_intercept:
            variances = variances - means * means
            target_variances = target_variances - target_means * target_means
            if with_products:
                products = products - np.outer(target_means, means)
            means, target_means = means + x_shift, target_means + y_shift
            target_variances = _without_rounding(target_variances, target_means, target_means.dtype)
            variances = _without_rounding(variances, means, dtype)
        else:
            means, target_means = np.zeros_like(means), np.zeros_like(target_means)
        products = np.where(variances > 0, products, 0.0)
    overflow, vanish = not np.isfinite(squares), bool(sums["vanished"])
    return ColumnMoments(weight, means, variances, target_means, target_variances, products, overflow, vanish)


def _without_rounding(variances: Array, means: Array, dtype: np.dtype[Any]) -> Array:
    limits = np.square(ROUNDING * np.finfo(dtype).eps * means)
    return np.where(variances > limits, variances, 0.0)


def rows_and_weights(block: Any) -> tuple[Any, Array, Array]:
    """Return X, y of shape (rows, outputs), and the weights."""
    y = block.y.reshape(len(block.y), -1)
    weights = getattr(block, "sample_weight", None)
    return block.X, y, np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)


def _first_means(c: IterationStep, fit_intercept: bool) -> tuple[Array, Array]:
    """Return means of the columns of X and y over the first block with any weight. Sparse columns have 0."""
    mine = next((means for block in c.blocks if (means := _means(block, fit_intercept)) is not None), None)
    found = c.gather(mine) if c.num_tasks > 1 else [mine]
    first: tuple[Array, Array] = next(means for means in found if means is not None)
    return first


def _means(block: Any, fit_intercept: bool) -> tuple[Array, Array] | None:
    X, y, weights = rows_and_weights(block)
    total = weights.sum()
    if not total > 0:
        return None
    if not fit_intercept:
        return np.zeros(X.shape[1]), np.zeros(y.shape[1])
    means = np.asarray(X.T @ weights, np.float64) / total
    if is_sparse(X):  # other columns have zeros, which must not become deviations
        means = np.where(_is_full(X), means, 0.0)
    return means, y.T @ weights / total


def _is_full(X: Any) -> Array:
    """Return which columns of a sparse matrix have a stored number in each row."""
    return np.asarray(np.bincount(X.indices, minlength=X.shape[1]) == X.shape[0])


def _sums(block: Any, x_shift: Array, y_shift: Array, with_products: bool) -> dict[str, Any]:
    X, y, weights = rows_and_weights(block)
    y = y - y_shift
    weighted = y * weights[:, None]
    sums = _sparse_sums if is_sparse(X) else _dense_sums
    deviations, squares, vanished = sums(X, weights, x_shift)
    target_squares = (y * weighted).sum(axis=0)
    small = target_squares < LEAST_SQUARES
    vanished += int(np.count_nonzero(weighted[:, small]))
    return {
        "weight": weights.sum(),
        "X": deviations,
        "XX": squares,
        "y": weighted.sum(axis=0),
        "yy": target_squares,
        "yX": _products(X, weighted, x_shift) if with_products else None,
        "vanished": vanished,
    }


def _dense_sums(X: Array, weights: Array, shift: Array) -> tuple[Array, Array, int]:
    features = X.shape[1]
    sums, squares, vanished = np.zeros(features), np.zeros(features), 0
    size = max(1, CHUNK // features)
    for begin in range(0, len(X), size):
        part = slice(begin, begin + size)
        rows = X[part] - shift
        sums += weights[part] @ rows
        rows *= rows
        of_part = weights[part] @ rows
        squares += of_part
        if (small := of_part < LEAST_SQUARES).any():
            vanished += int(np.count_nonzero((X[part][:, small] - shift[small])[weights[part] > 0]))
    return sums, squares, vanished


def _sparse_sums(X: Any, weights: Array, shift: Array) -> tuple[Array, Array, int]:
    """Sum the stored numbers, and add what the zeros would have added."""
    values, of_zeros = X.data.astype(np.float64, copy=False), np.zeros(X.shape[1])
    if shift.any():
        values = values - shift[X.indices]
        of_columns = transposed(_with_values(X, np.ones(len(values)))) @ weights
        of_zeros = np.where(_is_full(X), 0.0, weights.sum() - of_columns)
    sums = transposed(X if values is X.data else _with_values(X, values)) @ weights
    squares = transposed(_with_values(X, values * values)) @ weights
    vanished, small = 0, squares < LEAST_SQUARES
    if small.any():
        of_rows = np.repeat(weights, np.diff(X.indptr))
        vanished = int(np.count_nonzero((values * of_rows)[small[X.indices]]))
    return sums - of_zeros * shift, squares + of_zeros * shift * shift, vanished


def _with_values(X: Any, values: Array) -> Any:
    return type(X)((values, X.indices, X.indptr), shape=X.shape)


def _products(X: Any, targets: Array, shift: Array) -> Array:
    """Return the sums of products of targets, which have weights already, with deviations."""
    if is_sparse(X):
        products = np.asarray((transposed(X) @ targets).T)
    else:
        products, size = np.zeros((targets.shape[1], X.shape[1])), max(1, CHUNK // X.shape[1])
        for begin in range(0, len(X), size):
            part = slice(begin, begin + size)
            products += targets[part].T @ X[part].astype(np.float64, copy=False)
    return np.asarray(products - targets.sum(axis=0)[:, None] * shift)
