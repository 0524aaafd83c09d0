"""The optimizers that choose a direction, and then a length by the losses along it: three ways to choose a direction.

The line search tries few lengths:

1. One length comes first, with the gradient, because it is nearly always right. `judge_move` compares both ends.
2. If it is wrong, the losses at all of `lengths_to_try` are computed in one pass over the rows, and `best_length` takes
   the least. So a step costs at most one sum more, of a few scalars, and never a loop of sums.

The losses contain the penalties. A change is the derivative at one end along the whole move, so a path that bends where
it leaves an orthant is no special case. The conditions of Wolfe are in Nocedal and Wright, Numerical Optimization
(2006), chapter 3; that for losses that differ by rounding errors, in Hager and Zhang, SIAM J. Optim. 16 (2005).

The penalty l1 * sum |w_j| has kinks, but within one orthant it is linear. A step stays in one: that of w, and for
weights at 0 that into which the loss decreases. So weights stop at 0 instead of jumping over it. G. Andrew and J. Gao,
Scalable training of L1-regularized log-linear models, ICML 2007. `factors` is l1 for each weight; 0 for those without a
penalty, for which nothing changes.
"""

from __future__ import annotations

import enum
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.optimizers.objective import Objective, SummedObjective
from ronde.ml.optimizers.optimizer import Optimizer, SearchState

__all__ = [
    "CurvaturePairs",
    "DescentOptimizer",
    "GradientDescent",
    "LBFGS",
    "LengthVerdict",
    "Newton",
    "OWLQN",
    "align_direction",
    "best_length",
    "judge_move",
    "lengths_to_try",
    "project_on_orthant",
    "pseudo_gradient",
    "conjugate_gradients",
    "solve_symmetric",
]

Array = NDArray[Any]

LEAST_CURVATURE = 1e-12  # of a move, relative to the lengths of its pair: less is noise
DECREASE = 1e-4  # part of the expected decrease that a move must reach
FLATTER = 0.9  # part of the slope that may be left at its end
ROUNDING = 4e-15  # relative: losses that differ by less are equal
SHORTER = tuple(2.0**-k for k in (1, 2, 3, 4, 6, 9, 13, 18, 24, 32))
LONGER = tuple(2.0**k for k in (1, 2, 3, 4, 5, 6, 8, 10))


class _Point(NamedTuple):
    """An end of a move. `gradient`: of the smooth part."""

    w: Array
    loss: float
    gradient: Array
    length: float


class DescentOptimizer(Optimizer):
    """An optimizer that chooses a direction, and then the length of the step by a line search.

    Steps stay in an orthant, so the penalty l1 is exact; without it, that has no effect.

    Attributes:
        precision: Relative to the loss: if the direction promises less, rounding errors are why no length decreases the
            loss (1e-11, for losses in float64).
        takes_l1: Whether it minimizes objectives with the penalty l1 (True).
    """

    precision = 1e-11
    takes_l1 = True

    def check(self, objective: Objective) -> None:
        super().check(objective)
        if objective.l1 and not self.takes_l1:
            raise UsageError(
                f"{type(self).__name__} needs a smooth objective, and this has l1={objective.l1}: use OWLQN"
            )

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
        """Remember a move. Raises nothing.

        Args:
            search: Where the optimizer is, still at the start of the move.
            move: The difference of the weights.
            change: The difference of the gradients, without the penalty l1.
        """

    def forget(self, search: SearchState) -> bool:
        """Forget what has led to a direction without decrease; return whether there was something to forget.

        Raises nothing.

        Args:
            search: Where the optimizer is.
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
        direction = align_direction(direction, pseudo, factors)
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
            return project_on_orthant(search.w, search.w + length * direction, pseudo, factors)

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
        return judge_move(
            search.loss, float(np.vdot(pseudo, move)), end.loss, float(np.vdot(pseudo_there, move))
        )


# Directions


class GradientDescent(DescentOptimizer):
    """Takes steps along the gradient over all rows.

    A line search finds the length of each step. Its first guess follows from the last move and the change of the
    gradient on it: J. Barzilai and J. M. Borwein, Two-point step size gradient methods, IMA J. Numer. Anal. 8 (1988).

    Args:
        max_iter: The largest number of steps.
        tol: The largest component of the gradient at which it ends.
    """

    def __init__(self, max_iter: int = 1000, tol: float = 1e-6) -> None:
        super().__init__(max_iter, tol)

    def first_memory(self) -> dict[str, float]:
        return {}

    def direction(self, search: SearchState, pseudo: Array, total: SummedObjective) -> tuple[Array, float]:
        return -pseudo, search.memory.get("length", 1 / float(np.linalg.norm(pseudo)))

    def learn(self, search: SearchState, move: Array, change: Array) -> None:
        curvature = float(np.vdot(move, change))
        if curvature > 0:
            search.memory["length"] = float(np.vdot(move, move)) / curvature

    def forget(self, search: SearchState) -> bool:
        return search.memory.pop("length", None) is not None


class OWLQN(DescentOptimizer):
    """L-BFGS for objectives with the penalty l1, whose minimum has weights that are exactly 0.

    The method is that of Andrew and Gao, Scalable training of L1-regularized log-linear models (2007): steps as of
    L-BFGS, each within one orthant. With l1 = 0 it is L-BFGS.

    Args:
        max_iter: The largest number of steps.
        tol: The largest component of the gradient at which it ends; where a weight is 0, of what exceeds l1.
        memory: How many moves it remembers.
    """

    def __init__(self, max_iter: int = 100, tol: float = 1e-6, memory: int = 10) -> None:
        super().__init__(max_iter, tol)
        if memory < 1:
            raise UsageError(f"memory={memory} is invalid: expected 1 or more")
        self.memory = memory

    def first_memory(self) -> CurvaturePairs:
        return CurvaturePairs(self.memory)

    def direction(self, search: SearchState, pseudo: Array, total: SummedObjective) -> tuple[Array, float]:
        pairs: CurvaturePairs = search.memory
        return -pairs.solve(pseudo), 1.0 if len(pairs) else 1 / float(np.linalg.norm(pseudo))

    def learn(self, search: SearchState, move: Array, change: Array) -> None:
        search.memory.add(move, change)

    def forget(self, search: SearchState) -> bool:
        had_some = len(search.memory) > 0
        search.memory.clear()
        return had_some


class LBFGS(OWLQN):
    """The quasi-Newton method of Liu and Nocedal (1989): the first choice for smooth objectives.

    A step takes the rows from memory once, for loss and gradient at the new weights, and sums them over all tasks. If
    the length of the step is wrong, one more pass computes the losses at some other lengths.

    Args:
        max_iter: The largest number of steps.
        tol: The largest component of the gradient at which it ends.
        memory: How many moves it remembers.
    """

    takes_l1 = False


class CurvaturePairs:
    """What L-BFGS knows of the curvature: the last moves, and how the gradient has changed on each.

    The two-loop recursion multiplies a vector with the inverse Hessian that these pairs imply. D. C. Liu and J.
    Nocedal, On the limited memory BFGS method, Mathematical Programming 45 (1989); Nocedal and Wright, algorithm 7.4.

    Args:
        memory: How many pairs to keep.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._pairs: list[tuple[Array, Array, float]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, move: Array, change: Array) -> None:
        """Add a pair, unless the function was not convex along the move."""
        curvature = float(np.vdot(move, change))
        if curvature > LEAST_CURVATURE * float(np.linalg.norm(move) * np.linalg.norm(change)):
            self._pairs = [*self._pairs, (move, change, curvature)][-self._memory :]

    def clear(self) -> None:
        """Forget all pairs."""
        self._pairs = []

    def solve(self, vector: Array) -> Array:
        """Return the inverse Hessian times a vector; without pairs, the vector."""
        result = vector.copy()
        factors = []
        for move, change, curvature in reversed(self._pairs):
            factors.append(float(np.vdot(move, result)) / curvature)
            result -= factors[-1] * change
        if self._pairs:
            move, change, curvature = self._pairs[-1]
            result *= curvature / float(np.vdot(change, change))
        for (move, change, curvature), factor in zip(self._pairs, reversed(factors)):
            result += (factor - float(np.vdot(change, result)) / curvature) * move
        return result


class Newton(DescentOptimizer):
    """Newton's method, damped by a line search: few steps, each more expensive than a step of L-BFGS.

    Up to `dense_size` weights, a step sums the matrix of second derivatives over the rows and solves with it. Above, it
    solves by conjugate gradients, and each of their iterations is a pass over the rows.

    Args:
        max_iter: The largest number of steps.
        tol: The largest component of the gradient at which it ends.
        dense_size: The largest number of weights for which the matrix is formed.
        max_products: The largest number of passes of one step, if the matrix is not formed.
    """

    takes_l1 = False

    def __init__(
        self, max_iter: int = 50, tol: float = 1e-6, dense_size: int = 500, max_products: int = 100
    ) -> None:
        super().__init__(max_iter, tol)
        self.dense_size, self.max_products = dense_size, max_products

    def first_memory(self) -> None:
        return None

    def direction(self, search: SearchState, pseudo: Array, total: SummedObjective) -> tuple[Array, float]:
        w = search.w
        if w.size <= self.dense_size:
            return -solve_symmetric(total.hessian(w), pseudo.ravel()).reshape(w.shape), 1.0
        tolerance = min(0.5, float(np.sqrt(np.linalg.norm(pseudo))))
        product = conjugate_gradients(
            lambda v: total.hessian_product(w, v), pseudo, tolerance, self.max_products
        )
        return -product, 1.0


def solve_symmetric(matrix: Array, vector: Array) -> Array:
    """Return the solution of `matrix @ x == vector`, with |eigenvalues| so that it leads downhill also at a saddle.

    Eigenvalues that are 0 within rounding errors, such as those of shifts that leave all probabilities of classes as
    they are, count as the largest one: the step there is a short one along the gradient.
    """
    values, vectors = np.linalg.eigh(matrix)
    values = np.abs(values)
    largest = float(values.max()) or 1.0
    is_zero = values <= len(values) * np.finfo(np.float64).eps * largest
    solution: Array = vectors @ ((vectors.T @ vector) / np.where(is_zero, largest, values))
    return solution


def conjugate_gradients(
    product: Callable[[Array], Array], vector: Array, tolerance: float, max_products: int
) -> Array:
    """Return the solution of `product(x) == vector`, or an approximation to it in which `x . vector` is positive.

    Args:
        product: Multiplies with a symmetric matrix that has no negative eigenvalue.
        vector: Not 0.
        tolerance: The length of the error `vector - product(x)` at which it ends, relative to that of the vector.
        max_products: The largest number of products.
    """
    x, residual = np.zeros_like(vector), vector.copy()
    direction = residual.copy()
    squared = float(np.vdot(residual, residual))
    limit = tolerance**2 * squared
    for _ in range(max_products):
        along = product(direction)
        curvature = float(np.vdot(direction, along))
        if curvature <= 0:  # flat, within rounding errors
            break
        length = squared / curvature
        x += length * direction
        residual -= length * along
        before, squared = squared, float(np.vdot(residual, residual))
        if squared <= limit:
            break
        direction = residual + squared / before * direction
    return x if np.vdot(x, vector) > 0 else vector


# Lengths


class LengthVerdict(enum.Enum):
    """What to do with a length."""

    ACCEPT = enum.auto()
    TRY_SHORTER = enum.auto()
    TRY_LONGER = enum.auto()


def judge_move(loss: float, expected_change: float, new_loss: float, further_change: float) -> LengthVerdict:
    """Return whether a move is good.

    Args:
        loss: At the start.
        expected_change: The derivative at the start along the move, below 0.
        new_loss: At the end.
        further_change: The derivative at the end along the move: how the loss would go on.
    """
    is_equal = abs(new_loss - loss) <= ROUNDING * abs(loss)
    if is_equal and abs(further_change) <= FLATTER * -expected_change:
        return LengthVerdict.ACCEPT
    if not new_loss <= loss + DECREASE * expected_change:  # also if it is not a number
        return LengthVerdict.TRY_SHORTER
    return LengthVerdict.TRY_LONGER if further_change < FLATTER * expected_change else LengthVerdict.ACCEPT


def lengths_to_try(verdict: LengthVerdict, length: float) -> list[float]:
    """Return the lengths whose losses decide, after this verdict on a length."""
    return [length * factor for factor in (SHORTER if verdict is LengthVerdict.TRY_SHORTER else LONGER)]


def best_length(lengths: Sequence[float], losses: Sequence[float], limit: float) -> float | None:
    """Return the length with the least loss; None if none is below the limit."""
    loss, length = min(
        (loss if math.isfinite(loss) else math.inf, length) for loss, length in zip(losses, lengths)
    )
    return length if loss < limit else None


# Orthants: within one the penalty l1 is smooth


def pseudo_gradient(w: Array, gradient: Array, factors: Array) -> Array:
    """Return the least subgradient of loss plus penalty; it is 0 only at the minimum.

    `gradient`: of the smooth part.
    """
    at_zero = gradient - np.clip(gradient, -factors, factors)
    result: Array = np.where(w == 0, at_zero, gradient + factors * np.sign(w))
    return result


def align_direction(direction: Array, pseudo: Array, factors: Array) -> Array:
    """Return the direction without the components in which the penalized function does not decrease."""
    return np.where((factors > 0) & (direction * pseudo >= 0), 0.0, direction)


def project_on_orthant(w: Array, moved: Array, pseudo: Array, factors: Array) -> Array:
    """Return `moved`, with 0 in place of the weights that have left the orthant of the step from w."""
    orthant = np.where(w == 0, -np.sign(pseudo), np.sign(w))
    return np.where((factors > 0) & (moved * orthant <= 0), 0.0, moved)
