"""What L-BFGS knows of the curvature: the last moves, and how the gradient has changed on each.

The two-loop recursion multiplies a vector with the inverse Hessian that these pairs imply. D. C. Liu and J. Nocedal, On
the limited memory BFGS method, Mathematical Programming 45 (1989); Nocedal and Wright, algorithm 7.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CurvaturePairs"]

Array = NDArray[Any]

LEAST_CURVATURE = 1e-12  # of a move, relative to the lengths of its pair: less is noise


class CurvaturePairs:
    """The last pairs of a move and the change of the gradient.

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
