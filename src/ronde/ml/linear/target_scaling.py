"""Targets with mean 0 and variance 1, so that a tolerance has the same meaning whatever the units of y."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.linear.column_moments import ColumnMoments

__all__ = ["TargetScaling", "target_scaling"]

Array = NDArray[Any]


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
