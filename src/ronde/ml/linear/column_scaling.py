"""Columns with mean 0 and variance 1, without a copy of X: weights are converted in place of rows.

The score of a row is the same for `w` and the standardized columns as for `scaling.for_rows(w)` and X. So sparse rows
stay sparse, and a fit takes as many steps as if the columns were of one scale and centered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.base import overflow_message, vanishing_message
from ronde.ml.linear.column_moments import ColumnMoments, column_moments
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData

__all__ = ["ColumnScaling", "column_scaling", "curvature_scaling", "in_range", "moments_of", "no_scaling"]

Array = NDArray[Any]


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


def no_scaling(num_features: int) -> ColumnScaling:
    """Return what leaves the columns as they are."""
    return ColumnScaling(np.zeros(num_features), np.ones(num_features))


def column_scaling(model: Any, data: TrainingData) -> ColumnScaling:
    """Return means and standard deviations of the columns of X. Constant columns have the scale 1.

    Without an intercept, nothing could make up for the means: they are 0, and the scales are root mean squares. `model`
    and errors: as of `moments_of`.
    """
    moments = moments_of(model, data)
    return ColumnScaling(moments.means, moments.scales)


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
