"""`StandardizedObjective`: a `LinearObjective` whose minimum is found in as few steps as with standardized columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.linear.column_scaling import ColumnScaling
from ronde.ml.optimizers import LinearObjective, Objective

__all__ = ["StandardizedObjective"]

Array = NDArray[Any]


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
