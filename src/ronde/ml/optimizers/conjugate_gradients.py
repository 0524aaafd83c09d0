"""Conjugate gradients: solves a system of equations by products with its matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["solve"]

Array = NDArray[Any]


def solve(product: Callable[[Array], Array], vector: Array, tolerance: float, max_products: int) -> Array:
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
