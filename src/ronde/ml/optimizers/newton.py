"""`Newton`: the method with second derivatives, of few or many weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.optimizers.conjugate_gradients import solve
from ronde.ml.optimizers.descent import DescentOptimizer
from ronde.ml.optimizers.objective import Objective
from ronde.ml.optimizers.optimizer import SearchState
from ronde.ml.optimizers.summed_objective import SummedObjective

__all__ = ["Newton", "solve_symmetric"]

Array = NDArray[Any]


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

    def __init__(
        self, max_iter: int = 50, tol: float = 1e-6, dense_size: int = 500, max_products: int = 100
    ) -> None:
        super().__init__(max_iter, tol)
        self.dense_size, self.max_products = dense_size, max_products

    def check(self, objective: Objective) -> None:
        super().check(objective)
        if objective.l1:
            raise UsageError(f"Newton needs a smooth objective, and this has l1={objective.l1}: use OWLQN")

    def first_memory(self) -> None:
        return None

    def direction(self, search: SearchState, pseudo: Array, total: SummedObjective) -> tuple[Array, float]:
        w = search.w
        if w.size <= self.dense_size:
            return -solve_symmetric(total.hessian(w), pseudo.ravel()).reshape(w.shape), 1.0
        tolerance = min(0.5, float(np.sqrt(np.linalg.norm(pseudo))))
        product = solve(lambda v: total.hessian_product(w, v), pseudo, tolerance, self.max_products)
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
