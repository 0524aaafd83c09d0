"""Losses of boosting: what is computed natively (cpp/trees/gradients.h), and the first scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from ronde.errors import UsageError

__all__ = [
    "LOGISTIC",
    "REGRESSION_LOSSES",
    "BoostingLoss",
    "OwnLoss",
    "derive_own",
    "ranking_loss",
    "regression_loss",
    "softmax_loss",
]

Array = NDArray[Any]
LEAST_PROBABILITY = 1e-15


OwnLoss = Callable[[Array, Array], tuple[Array, Array, Array]]


@dataclass(frozen=True)
class BoostingLoss:
    """A loss.

    Attributes:
        number: That of `Loss` in cpp/trees/gradients.h; -1: another function computes it.
        score_count: How many scores a row has.
        quantile: Of the residuals in a leaf, which is its value; None: a Newton step is.
        first_quantile: Of the targets, which is the first score; None: `baseline` makes it of sums.
        size_quantile: Of the absolute residuals, in each step: the parameter of the native loss.
        parameter: Of the native loss.
        is_log: Whether scores are logarithms of means.
        least_target: Targets are not smaller.
        excludes_least: Nor that small.
        own: The function of a user's loss.
        truncation: Of LambdaRank: how many rows of a query, the first ones by score, count; 0: another loss.
    """

    number: int
    score_count: int = 1
    quantile: float | None = None
    first_quantile: float | None = None
    size_quantile: float | None = None
    parameter: float = 0.0
    is_log: bool = False
    least_target: float = -np.inf
    excludes_least: bool = False
    own: OwnLoss | None = None
    truncation: int = 0

    def baseline(self, sums: Array) -> Array:
        """Return the first scores, without a quantile.

        `sums`: those of the weights and of the weighted targets; of several classes, of the weights of each.
        """
        if self.score_count > 1:
            logarithms = np.log(np.maximum(sums / sums.sum(), LEAST_PROBABILITY))
            return np.asarray(logarithms - logarithms.mean())
        if self.number < 0:
            return np.zeros(1)
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


def ranking_loss(truncation: int) -> BoostingLoss:
    """Return the loss of LambdaRank: 1 - NDCG of the first rows of each query."""
    return BoostingLoss(-1, truncation=truncation)


POISSON = BoostingLoss(3, is_log=True, least_target=0)

# Of numbers, by name, from a quantile and a power.
_OF_NUMBERS: dict[str, Callable[[float | None, float], BoostingLoss]] = {
    "squared_error": lambda quantile, power: BoostingLoss(0),
    "absolute_error": lambda quantile, power: BoostingLoss(1, quantile=0.5, first_quantile=0.5),
    "quantile": lambda quantile, power: quantile_loss(0.5 if quantile is None else float(quantile)),
    "huber": lambda quantile, power: BoostingLoss(
        7, first_quantile=0.5, size_quantile=0.9 if quantile is None else float(quantile)
    ),
    "poisson": lambda quantile, power: POISSON,
    "gamma": lambda quantile, power: BoostingLoss(4, is_log=True, least_target=0, excludes_least=True),
    "tweedie": lambda quantile, power: BoostingLoss(8, parameter=power, is_log=True, least_target=0),
}
REGRESSION_LOSSES = set(_OF_NUMBERS)


def quantile_loss(quantile: float) -> BoostingLoss:
    """Return the loss whose least sum is at a quantile."""
    return BoostingLoss(2, quantile=quantile, first_quantile=quantile, parameter=quantile)


def regression_loss(loss: str | OwnLoss, quantile: float | None, power: float) -> BoostingLoss:
    """Return the loss of that name, or that of a user's function.

    `quantile`: of the losses "quantile" and "huber"; `power`: of "tweedie".
    """
    if callable(loss):
        return BoostingLoss(-1, own=loss)
    return _OF_NUMBERS[loss](quantile, float(power))


def derive_own(
    function: OwnLoss, y: Array, scores: Array, weights: Array | None, is_held: Array | None
) -> tuple[Array, Array, Array]:
    """Return weighted gradients and hessians of some rows by a user's loss, and the sums of the losses of rows that
    count and of those held out.

    Raises UsageError unless the function returns three arrays with a finite number for each row, and hessians of at
    least 0.
    """
    name = getattr(function, "__name__", repr(function))
    returned = function(y.copy(), scores.copy())
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise UsageError(
            f"loss {name} returned {type(returned).__name__}: expected (gradients, hessians, losses)"
        )
    arrays = [np.asarray(each, np.float64) for each in returned]
    for kind, array in zip(("gradients", "hessians", "losses"), arrays):
        if array.shape != y.shape:
            raise UsageError(f"loss {name} returned {kind} of shape {array.shape}: expected {y.shape}")
        if not np.isfinite(array).all():
            raise UsageError(f"loss {name} returned {kind} that are not finite")
    gradients, hessians, losses = arrays
    if (hessians < 0).any():
        raise UsageError(f"loss {name} returned hessians below 0: expected second derivatives of at least 0")
    weight = np.ones(len(y)) if weights is None else weights
    counted = weight if is_held is None else np.where(is_held, 0.0, weight)
    sums = np.array([(counted * losses).sum(), ((weight - counted) * losses).sum()])
    return gradients * counted, hessians * counted, sums


def softmax_loss(classes: int) -> BoostingLoss:
    """Return the loss of more than two classes."""
    return BoostingLoss(6, score_count=classes)
