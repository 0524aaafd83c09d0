"""The perceptron's rule for all rows at once: weights move towards the rows on their wrong side.

A step moves the weights of each class by the mean over all rows of weight * y * (x, 1), where y is 1 for the rows of
the class and -1 for others, and rows on the right side count as 0. That is gradient descent on the mean of
`PerceptronLoss` with the rate 1. Another rate would only scale the weights, because they start at 0. The columns are
standardized (`column_scaling`), because the number of steps depends on their means and scales.

The steps separate classes that a plane separates (R. Duda and P. Hart, Pattern Classification, section 5.5). For others
they never end, so the weights with the fewest mistakes are kept: S. Gallant, Perceptron-based learning algorithms, IEEE
Trans. Neural Networks 1 (1990).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.linear.column_scaling import ColumnScaling
from ronde.ml.losses import PerceptronLoss
from ronde.ml.optimizers.linear_objective import LinearObjective, row_chunks

__all__ = ["PerceptronSearch", "PerceptronStep"]

Array = NDArray[Any]


@dataclass
class PerceptronSearch:
    """Where the steps are; the same on all tasks.

    Attributes:
        w: The newest weights, of standardized columns, shape (classes, columns); one row for two classes.
        best: Those with the fewest mistakes.
        mistakes: How large a part of all rows is on the wrong side of `best`, for each class.
        idle_steps: How many steps have found nothing better.
        history: The records of all steps.
    """

    w: Array
    best: Array
    mistakes: Array
    idle_steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def from_weights(cls, w: Array) -> PerceptronSearch:
        """Return where the first step starts."""
        return cls(w, w, np.ones(len(w)))

    def move(self, mistakes: Array, gradient: Array) -> None:
        """Keep the weights of each class if they are the best so far, and move on."""
        is_better = mistakes < self.mistakes
        self.best = np.where(is_better[:, None], self.w, self.best)
        self.mistakes = np.minimum(mistakes, self.mistakes)
        self.idle_steps = 0 if is_better.any() else self.idle_steps + 1
        self.w = self.w - gradient
        # With all rows wrong, it is no best.
        self.best = np.where(self.mistakes[:, None] < 1, self.best, self.w)
        losses = {"loss": float(mistakes.mean()), "best_loss": float(self.mistakes.mean())}
        self.history.append({"step": len(self.history) + 1, **losses})

    def has_ended(self, patience: int) -> bool:
        """Return whether all rows are on the right side, or this number of steps has found nothing better."""
        return not self.mistakes.any() or self.idle_steps >= patience


class PerceptronStep:
    """The step of the iteration.

    Args:
        numbers: Of the classes that have weights.
        fit_intercept: Whether the last column of the weights is an intercept.
        scaling: Of the columns.
        total_weight: The sum of the weights of all rows.
        patience: As of `PerceptronSearch.has_ended`.
        report: Gets the record of each step and the best weights, on task 0; returns whether the fit shall end.
    """

    def __init__(
        self,
        numbers: Array,
        fit_intercept: bool,
        scaling: ColumnScaling,
        total_weight: float,
        patience: int,
        report: Callable[[Mapping[str, float], Array], bool],
    ) -> None:
        self._numbers, self._total_weight, self._patience = numbers, total_weight, patience
        self._scaling = scaling
        self._objective = LinearObjective(PerceptronLoss(), fit_intercept=fit_intercept)
        self._report = report

    def __call__(self, c: IterationStep) -> None:
        search: PerceptronSearch = c.state.search
        w = self._scaling.for_rows(search.w)
        mistakes, gradient = c.sum_blocks(lambda block: self._mistakes_and_gradient(block, w))
        search.move(mistakes / self._total_weight, self._scaling.gradient(gradient) / self._total_weight)
        should_stop = c.task_id == 0 and self._report(search.history[-1], search.best)
        c.stop_if(search.has_ended(self._patience) or should_stop)

    def _mistakes_and_gradient(self, block: Any, w: Array) -> tuple[Array, Array]:
        """Return the sum of the weights of the rows on the wrong side, for each class, and the gradient."""
        mistakes, gradient = np.zeros(len(w)), np.zeros(w.shape)
        for chunk in row_chunks(block):
            signs = np.where(chunk.y[:, None] == self._numbers, 1.0, -1.0)
            is_wrong = signs * self._objective.scores(chunk.X, w) <= 0
            slopes = chunk.weighted(np.where(is_wrong, -signs, 0.0))
            mistakes += np.abs(slopes).sum(axis=0)
            self._objective.add_gradient(gradient, chunk.X, slopes)
        return mistakes, gradient
