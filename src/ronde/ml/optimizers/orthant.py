"""How a penalty l1 * sum |w_j|, which has kinks, fits into methods for smooth functions.

Within one orthant the penalty is linear. A step stays in one: that of w, and for weights at 0 that into which the loss
decreases. So weights stop at 0 instead of jumping over it. G. Andrew and J. Gao, Scalable training of L1-regularized
log-linear models, ICML 2007.

`factors` is l1 for each weight; 0 for those without a penalty, for which nothing changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["align", "project", "pseudo_gradient"]

Array = NDArray[Any]


def pseudo_gradient(w: Array, gradient: Array, factors: Array) -> Array:
    """Return the least subgradient of loss plus penalty; it is 0 only at the minimum.

    `gradient`: of the smooth part.
    """
    at_zero = gradient - np.clip(gradient, -factors, factors)
    result: Array = np.where(w == 0, at_zero, gradient + factors * np.sign(w))
    return result


def align(direction: Array, pseudo: Array, factors: Array) -> Array:
    """Return the direction without the components in which the penalized function does not decrease."""
    return np.where((factors > 0) & (direction * pseudo >= 0), 0.0, direction)


def project(w: Array, moved: Array, pseudo: Array, factors: Array) -> Array:
    """Return `moved`, with 0 in place of the weights that have left the orthant of the step from w."""
    orthant = np.where(w == 0, -np.sign(pseudo), np.sign(w))
    return np.where((factors > 0) & (moved * orthant <= 0), 0.0, moved)
