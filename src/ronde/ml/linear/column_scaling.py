"""Columns with mean 0 and variance 1, without a copy of X: weights are converted in place of rows.

The score of a row is the same for `w` and the standardized columns as for `scaling.for_rows(w)` and X. So sparse rows
stay sparse, and a fit takes as many steps as if the columns were of one scale and centered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep, iterate
from ronde.light_dataclasses import dataclass
from ronde.ml.optimizers.linear_objective import row_chunks
from ronde.ml.tasks import SingleThreadedStep, place_of
from ronde.ml.training_data import TrainingData

__all__ = ["ColumnScaling", "column_scaling", "no_scaling"]

Array = NDArray[Any]

CONSTANT = 1e-12  # relative to the mean square: less variance may be rounding errors


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


def column_scaling(data: TrainingData, fit_intercept: bool, on: Any) -> ColumnScaling:
    """Read all rows once; return means and standard deviations of the columns of X.

    Without an intercept, nothing could make up for the means: they are 0, and the scales are root mean squares.
    Constant columns have the scale 1. Raises RemoteError.
    """
    place = place_of(None if isinstance(data.rows, Mapping) else on, data.size)
    step = SingleThreadedStep(_moments_step)
    sums = iterate(step, data=data.rows, state={"sums": None}, max_iter=1, on=place).state.sums
    mean_squares = sums["squares"] / sums["weight"]
    means = sums["columns"] / sums["weight"] if fit_intercept else np.zeros_like(mean_squares)
    variances = mean_squares - means * means
    return ColumnScaling(means, np.sqrt(np.where(variances > CONSTANT * mean_squares, variances, 1.0)))


def _moments_step(c: IterationStep) -> None:
    c.state.sums = c.sum_blocks(_moments)


def _moments(block: Any) -> dict[str, Any]:
    columns, squares, weight = np.zeros(block.X.shape[1]), np.zeros(block.X.shape[1]), 0.0
    for chunk in row_chunks(block):
        weights = chunk.weighted(np.ones(chunk.X.shape[0]))
        X = chunk.X.astype(np.float64, copy=False)
        columns += X.T @ weights
        squares += (X * X).T @ weights if isinstance(X, np.ndarray) else X.power(2).T @ weights
        weight += float(weights.sum())
    return {"columns": columns, "squares": squares, "weight": weight}
