"""A step of the optimizers that choose a direction, and then a length by the losses along it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.ml.optimizers.line_search import LengthVerdict, best_length, judge, lengths_to_try
from ronde.ml.optimizers.optimizer import Optimizer, SearchState
from ronde.ml.optimizers.orthant import align, project, pseudo_gradient
from ronde.ml.optimizers.summed_objective import SummedObjective

__all__ = ["DescentOptimizer"]

Array = NDArray[Any]


class _Point(NamedTuple):
    """An end of a move. `gradient`: of the smooth part."""

    w: Array
    loss: float
    gradient: Array
    length: float


class DescentOptimizer(Optimizer):
    """An optimizer that chooses a direction, and then the length of the step by a line search.

    Steps stay in an orthant (`orthant`), so the penalty l1 is exact; without it, that has no effect.

    Attributes:
        precision: Relative to the loss: if the direction promises less, rounding errors are why no length decreases the
            loss (1e-11, for losses in float64).
    """

    precision = 1e-11

    @abstractmethod
    def direction(self, search: SearchState, pseudo: Array, total: SummedObjective) -> tuple[Array, float]:
        """Return a direction, and the length to try first.

        Args:
            search: Where the optimizer is.
            pseudo: The gradient with the penalty l1, as of `pseudo_gradient`.
            total: The objective, summed over the rows of all tasks.

        Raises:
            RondeError: As of `advance`.
        """

    def learn(self, search: SearchState, move: Array, change: Array) -> None:
        """Remember a move.

        Args:
            search: Where the optimizer is, still at the start of the move.
            move: The difference of the weights.
            change: The difference of the gradients, without the penalty l1.

        Raises:
            Nothing.
        """

    def forget(self, search: SearchState) -> bool:
        """Forget what has led to a direction without decrease; return whether there was something to forget.

        Args:
            search: Where the optimizer is.

        Raises:
            Nothing.
        """
        return False

    def advance(self, search: SearchState, total: SummedObjective) -> None:
        factors = total.l1_factors(search.w)
        if search.gradient is None:
            search.loss, search.gradient = total.loss_and_gradient(search.w)
        pseudo = pseudo_gradient(search.w, search.gradient, factors)
        if self._has_ended(search, total.gradient_norm(pseudo)):
            return
        direction, length = self.direction(search, pseudo, total)
        direction = align(direction, pseudo, factors)
        point = self._search(search, pseudo, direction, length, total)
        if point is None:
            length = 0.0
            if not self.forget(search):
                promised = -float(np.vdot(pseudo, direction))
                is_precise = promised <= self.precision * abs(search.loss)
                search.reason = "precision" if is_precise else "no decrease"
        else:
            self.learn(search, point.w - search.w, point.gradient - search.gradient)
            search.w, search.loss, search.gradient, length = point
            pseudo = pseudo_gradient(search.w, search.gradient, factors)
        norm = total.gradient_norm(pseudo)
        search.record(norm, length)
        self._has_ended(search, norm)

    def _has_ended(self, search: SearchState, gradient_norm: float) -> bool:
        if gradient_norm <= self.tol:
            search.reason = "gradient"
        return search.reason is not None or not np.isfinite(search.loss)

    def _search(
        self, search: SearchState, pseudo: Array, direction: Array, length: float, total: SummedObjective
    ) -> _Point | None:
        """Return the end of the best move in a direction; None if no move decreases the loss."""
        if not np.vdot(pseudo, direction) < 0:
            return None
        factors = total.l1_factors(search.w)

        def moved(length: float) -> Array:
            return project(search.w, search.w + length * direction, pseudo, factors)

        def at(length: float) -> _Point:
            return _Point(moved(length), *total.loss_and_gradient(moved(length)), length)

        first = at(length)
        if np.array_equal(first.w, search.w):  # the move is less than a rounding error
            return None
        verdict = self._judge(search, pseudo, first, factors)
        if verdict is LengthVerdict.ACCEPT:
            return first
        lengths = lengths_to_try(verdict, length)
        limit = first.loss if verdict is LengthVerdict.TRY_LONGER else search.loss
        best = best_length(lengths, total.losses(np.stack([moved(each) for each in lengths])), limit)
        if best is not None:
            return at(best)
        return first if verdict is LengthVerdict.TRY_LONGER else None

    def _judge(self, search: SearchState, pseudo: Array, end: _Point, factors: Array) -> LengthVerdict:
        move = end.w - search.w
        pseudo_there = pseudo_gradient(end.w, end.gradient, factors)
        return judge(search.loss, float(np.vdot(pseudo, move)), end.loss, float(np.vdot(pseudo_there, move)))
