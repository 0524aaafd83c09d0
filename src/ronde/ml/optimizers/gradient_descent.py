"""`GradientDescent`: steps along the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.optimizers.descent import DescentOptimizer
from ronde.ml.optimizers.optimizer import SearchState
from ronde.ml.optimizers.summed_objective import SummedObjective

__all__ = ["GradientDescent"]

Array = NDArray[Any]


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
