"""Losses of boosting: what is computed natively (cpp/trees/gradients.h), and the first scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

__all__ = ["LOGISTIC", "BoostingLoss", "regression_loss", "softmax_loss"]

Array = NDArray[Any]
LEAST_PROBABILITY = 1e-15


@dataclass(frozen=True)
class BoostingLoss:
    """A loss.

    Attributes:
        number: That of `Loss` in cpp/trees/gradients.h.
        score_count: How many scores a row has.
        quantile: Of the residuals in a leaf, which is its value; None: a Newton step is.
        is_log: Whether scores are logarithms of means.
        least_target: Targets are not smaller.
        excludes_least: Nor that small.
    """

    number: int
    score_count: int = 1
    quantile: float | None = None
    is_log: bool = False
    least_target: float = -np.inf
    excludes_least: bool = False

    @property
    def parameter(self) -> float:
        """The parameter of the native loss."""
        return 0.0 if self.quantile is None else self.quantile

    def baseline(self, sums: Array) -> Array:
        """Return the first scores, without a quantile.

        `sums`: those of the weights and of the weighted targets; of several classes, of the weights of each.
        """
        if self.score_count > 1:
            logarithms = np.log(np.maximum(sums / sums.sum(), LEAST_PROBABILITY))
            return np.asarray(logarithms - logarithms.mean())
        mean = sums[1] / sums[0]
        if self.number == LOGISTIC.number:
            mean = min(max(mean, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
            return np.array([np.log(mean / (1 - mean))])
        return np.array([np.log(max(mean, LEAST_PROBABILITY)) if self.is_log else mean])

    def targets_problem(self, y: Array, name: str, are_all: bool) -> str | None:
        """Return what is wrong with targets of a regression, None: nothing.

        `name`: of the loss; `are_all`: whether these are the targets of all rows, some of which must be above 0.
        """
        if self.excludes_least and (y <= self.least_target).any():
            return f"loss={name!r} requires strictly positive y."
        if (y < self.least_target).any() or (are_all and self.least_target == 0 and not y.sum() > 0):
            return f"loss={name!r} requires non-negative y and sum(y) > 0."
        return None

    def predictions(self, scores: Array) -> Array:
        """Return numbers of shape (rows,), or probabilities of shape (rows, classes)."""
        if self.score_count > 1:
            return np.asarray(softmax(scores, axis=1))
        if self.number == LOGISTIC.number:
            return np.stack([expit(-scores[:, 0]), expit(scores[:, 0])], axis=1)
        return np.asarray(np.exp(scores[:, 0]) if self.is_log else scores[:, 0])


LOGISTIC = BoostingLoss(5)

_OF_NUMBERS: dict[str, Callable[[float], BoostingLoss]] = {
    "squared_error": lambda quantile: BoostingLoss(0),
    "absolute_error": lambda quantile: BoostingLoss(1, quantile=0.5),
    "quantile": lambda quantile: BoostingLoss(2, quantile=quantile),
    "poisson": lambda quantile: BoostingLoss(3, is_log=True, least_target=0),
    "gamma": lambda quantile: BoostingLoss(4, is_log=True, least_target=0, excludes_least=True),
}
REGRESSION_LOSSES = set(_OF_NUMBERS)


def regression_loss(name: str, quantile: float | None) -> BoostingLoss:
    """Return the loss of that name. `quantile`: of the loss "quantile"."""
    return _OF_NUMBERS[name](0.5 if quantile is None else float(quantile))


def softmax_loss(classes: int) -> BoostingLoss:
    """Return the loss of more than two classes."""
    return BoostingLoss(6, score_count=classes)
