"""The function that an optimizer minimizes, over the rows of all tasks: mean loss and penalties.

Sums are formed block by block in one fixed order, so they have the same bits for any number of tasks. All tasks call
the same methods in the same order, and get the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.errors import UsageError
from ronde.ml.optimizers.objective import Objective

__all__ = ["SummedObjective"]

Array = NDArray[Any]


class SummedObjective:
    """An objective in one step of an iteration.

    Attributes:
        total_weight: The sum of the weights of all rows.
        num_rows: The number of all rows.

    Args:
        objective: The user's.
        c: The step.
        total_weight: As it was in the first step (None: this is the first, compute it).
    """

    def __init__(self, objective: Objective, c: IterationStep, total_weight: float | None) -> None:
        self._objective, self._c = objective, c
        if total_weight is None:
            total_weight = float(c.sum_blocks(objective.total_weight))
            if not total_weight > 0:
                raise UsageError(f"the weights of all rows add up to {total_weight}: expected a sum above 0")
        self.total_weight, self.num_rows = total_weight, c.num_rows

    def loss_and_gradient(self, w: Array) -> tuple[float, Array]:
        """Return mean loss with all penalties, and the gradient of all but the penalty l1."""
        loss, gradient = self._c.sum_blocks(lambda block: self._block_loss_and_gradient(block, w))
        return self._penalized(loss, gradient, self.total_weight, w)

    def gradient_norm(self, gradient: Array) -> float:
        """Return what is compared with the tolerance."""
        return self._objective.gradient_norm(gradient)

    def losses(self, points: Array) -> list[float]:
        """Return mean loss with all penalties at several points."""
        losses = self._c.sum_blocks(
            lambda block: np.asarray(self._objective.losses(block, points), np.float64)
        )
        return [float(loss / self.total_weight + self._penalty(w)) for loss, w in zip(losses, points)]

    def hessian(self, w: Array) -> Array:
        """Return the second derivatives of all but the penalty l1, shape (w.size, w.size)."""
        total = self._c.sum_blocks(lambda block: self._objective.hessian(block, w)) / self.total_weight
        total[np.diag_indices(w.size)] += self._penalty_curvature(w).ravel()
        return np.asarray(total)

    def hessian_product(self, w: Array, direction: Array) -> Array:
        """Return the product of these second derivatives with a direction."""
        total = self._c.sum_blocks(lambda block: self._objective.hessian_product(block, w, direction))
        return np.asarray(total / self.total_weight + self._penalty_curvature(w) * direction)

    def batch_loss_and_gradient(self, w: Array, rows_of: Callable[[int, int], Array]) -> tuple[float, Array]:
        """Return `loss_and_gradient` of some rows instead of all.

        `rows_of`: from a block's number and its number of rows to the indices of those that count. Their sum is divided
        by the mean weight of as many rows, so that a row counts the same in whatever batch it is.
        """
        numbers = iter(self._c.block_range)

        def of_batch(block: Any) -> tuple[float, Array, int]:
            batch = _selected(block, rows_of(next(numbers), _row_count(block)))
            if not _row_count(batch):
                return 0.0, np.zeros(w.shape), 0
            return *self._block_loss_and_gradient(batch, w), _row_count(batch)

        loss, gradient, rows = self._c.sum_blocks(of_batch)
        weight = self.total_weight * (int(rows) or 1) / self.num_rows
        return self._penalized(loss, gradient, weight, w)

    def l1_factors(self, w: Array) -> Array:
        """Return the factor of the absolute value of each weight: 0 where no penalty counts."""
        return self._objective.l1 * self._objective.penalty_factors(w)

    def _block_loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        loss, gradient = self._objective.loss_and_gradient(block, w)
        gradient = np.asarray(gradient, np.float64)
        if gradient.shape != w.shape or np.ndim(loss):
            raise UsageError(
                f"{type(self._objective).__name__}.loss_and_gradient returned a loss of shape {np.shape(loss)} and a "
                f"gradient of shape {gradient.shape}: expected a number, and the shape of w, {w.shape}"
            )
        return float(loss), gradient

    def _penalized(self, loss: float, gradient: Array, weight: float, w: Array) -> tuple[float, Array]:
        return float(loss / weight + self._penalty(w)), gradient / weight + self._penalty_curvature(w) * w

    def _penalty(self, w: Array) -> float:
        l1, l2 = self._objective.l1, self._objective.l2
        counted = w * self._objective.penalty_factors(w)
        return float(l1 * np.abs(counted).sum() + l2 * np.square(counted).sum())

    def _penalty_curvature(self, w: Array) -> Array:
        """Return the second derivative of the penalty l2 by each weight."""
        return 2 * self._objective.l2 * np.square(self._objective.penalty_factors(w))


def _row_count(block: Any) -> int:
    rows = next(iter(vars(block).values())) if isinstance(block, SimpleNamespace) else block
    return int(rows.shape[0]) if hasattr(rows, "shape") else len(rows)


def _selected(block: Any, rows: Array) -> Any:
    """Return a block of the rows with these indices."""
    if isinstance(block, SimpleNamespace):
        return SimpleNamespace(**{name: _selected(value, rows) for name, value in vars(block).items()})
    if hasattr(block, "iloc"):
        return block.iloc[rows]
    return [block[row] for row in rows] if isinstance(block, list) else block[rows]
