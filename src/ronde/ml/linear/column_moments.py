"""Means and variances of the columns of X and y, and the one rule by which a column of X is constant.

Deviations are summed from a point near the mean, the mean of the first rows, so that a large mean costs no digits. A
column is constant if its deviations are rounding errors: if its standard deviation is at most `ROUNDING` units in the
last place of its mean. No fit divides by such a deviation, and the coefficient of the column is 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.optimizers.linear_objective import transposed
from ronde.ml.sparse_rows import is_sparse

__all__ = ["CHUNK", "ColumnMoments", "column_moments", "rows_and_weights"]

Array = NDArray[Any]

ROUNDING = 4  # units in the last place
CHUNK = 1 << 18  # numbers of X whose deviations are formed at a time
LEAST_SQUARES = 1e-290  # sums of squares below have lost digits


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
