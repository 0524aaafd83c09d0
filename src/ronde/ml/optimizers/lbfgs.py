"""`LBFGS` and `OWLQN`: quasi-Newton methods with a limited memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.optimizers.curvature_pairs import CurvaturePairs
from ronde.ml.optimizers.descent import DescentOptimizer
from ronde.ml.optimizers.objective import Objective
from ronde.ml.optimizers.optimizer import SearchState
from ronde.ml.optimizers.summed_objective import SummedObjective

__all__ = ["LBFGS", "OWLQN"]

Array = NDArray[Any]


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

    def check(self, objective: Objective) -> None:
        super().check(objective)
        if objective.l1:
            raise UsageError(f"LBFGS needs a smooth objective, and this has l1={objective.l1}: use OWLQN")
