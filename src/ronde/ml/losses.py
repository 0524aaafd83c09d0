"""Losses of predictions: the value for each row, its slope, and its curvature.

A prediction is a score, such as `X @ w`. All losses are convex in it. None overflows, however large a score is: where
an exponential is needed, its argument is not positive.

| loss | a row's value at score s | y |
|---|---|---|
| `SquaredLoss` | (s - y)^2 / 2, summed over outputs | numbers, (rows,) or (rows, outputs) |
| `LogisticLoss` | log(1 + exp(-y s)) | -1 or 1 |
| `MultinomialLoss(k)` | log(sum_j exp(s_j)) - s_y | class 0 to k - 1; scores (rows, k) |
| `HingeLoss` | max(0, 1 - y s) | -1 or 1 |
| `SquaredHingeLoss` | max(0, 1 - y s)^2 | -1 or 1 |
| `PerceptronLoss` | max(0, -y s) | -1 or 1 |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

__all__ = [
    "HingeLoss",
    "LogisticLoss",
    "Loss",
    "MultinomialLoss",
    "PerceptronLoss",
    "SquaredHingeLoss",
    "SquaredLoss",
]

Array = NDArray[Any]


class Loss(ABC):
    """A loss of scores. Its methods take some rows and return something for each of them, not sums."""

    @abstractmethod
    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        """Return the loss of each row, and its derivative by the scores. Raises nothing.

        Args:
            y: The targets, with one entry or row for each row of the data.
            scores: The predictions, shape (rows,) or (rows, outputs).

        Returns:
            Values, shape (rows,), and slopes, of the scores' shape. At a kink the slope is one of the subgradients.
        """

    def check_targets(self, y: Array) -> None:
        """Check that the loss is defined for these targets. An optimizer asks once, before its first step.

        Args:
            y: As of `values_and_slopes`.

        Raises:
            UsageError: It is not. The error says which targets are valid.
        """
        if y.dtype.kind not in "biuf":
            raise UsageError(f"y has the dtype {y.dtype}: {type(self).__name__} expects numbers")

    def values(self, y: Array, scores: Array) -> Array:
        """Return the loss of each row. Raises nothing.

        Args:
            y: As of `values_and_slopes`.
            scores: As of `values_and_slopes`.
        """
        return self.values_and_slopes(y, scores)[0]

    def curvature_product(self, y: Array, scores: Array, direction: Array) -> Array:
        """Return the product of each row's second derivatives by the scores with a direction of scores.

        Args:
            y: As of `values_and_slopes`.
            scores: As of `values_and_slopes`.
            direction: Of the scores' shape.

        Raises:
            NotImplementedError: The loss has no second derivative.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no second derivative: minimize it with an optimizer that needs none"
        )


class TwoClassLoss(Loss):
    """A loss whose targets are -1 and 1."""

    def check_targets(self, y: Array) -> None:
        super().check_targets(y)
        if (other := np.flatnonzero(np.abs(y) != 1)).size:
            raise UsageError(
                f"the target {y.flat[other[0]]} is invalid: {type(self).__name__} expects y to be -1 or 1; convert 0 "
                "and 1 by 2 * y - 1"
            )


class SquaredLoss(Loss):
    """Half the squared distance of score and target, summed over the outputs if there are several."""

    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        slopes = scores - y
        values = 0.5 * slopes * slopes
        return values if values.ndim == 1 else values.sum(axis=1), slopes

    def curvature_product(self, y: Array, scores: Array, direction: Array) -> Array:
        return direction


class LogisticLoss(TwoClassLoss):
    """log(1 + exp(-y s)): minus the log-likelihood of the probability 1 / (1 + exp(-s)) of class 1; y is -1 or 1."""

    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        margins = y * scores
        small = np.exp(-np.abs(margins))
        values = np.log1p(small) - np.minimum(margins, 0)
        # The probability of the wrong class: small / (1 + small) where the margin is positive, else 1 / (1 + small).
        wrong = np.where(margins > 0, small, 1) / (1 + small)
        return values, -y * wrong

    def curvature_product(self, y: Array, scores: Array, direction: Array) -> Array:
        small = np.exp(-np.abs(scores))
        product: Array = small / (1 + small) ** 2 * direction
        return product


class MultinomialLoss(Loss):
    """log(sum_j exp(s_j)) - s_y: minus the log-likelihood of softmax(s); y is the number of the class, from 0.

    Args:
        num_classes: The number of scores of a row.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def check_targets(self, y: Array) -> None:
        super().check_targets(y)
        is_class = (y >= 0) & (y < self.num_classes) & (y == np.floor(y))
        if (other := np.flatnonzero(~is_class)).size:
            raise UsageError(
                f"the target {y.flat[other[0]]} is invalid: MultinomialLoss({self.num_classes}) expects y to be the "
                f"number of a class, 0 to {self.num_classes - 1}"
            )

    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        probabilities, logs_of_sums = _softmax(scores)
        rows, classes = np.arange(len(y)), y.astype(np.intp, copy=False)
        values = logs_of_sums - scores[rows, classes]
        probabilities[rows, classes] -= 1
        return values, probabilities

    def curvature_product(self, y: Array, scores: Array, direction: Array) -> Array:
        probabilities, _ = _softmax(scores)
        product: Array = probabilities * direction
        product -= probabilities * product.sum(axis=1, keepdims=True)
        return product


class HingeLoss(TwoClassLoss):
    """max(0, 1 - y s): that of a support vector machine; y is -1 or 1. It has a kink: minimize it with `SGD`."""

    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        missing = 1 - y * scores
        return np.maximum(missing, 0), np.where(missing > 0, -y, 0.0)


class SquaredHingeLoss(TwoClassLoss):
    """max(0, 1 - y s)^2: that of a support vector machine without a kink; y is -1 or 1."""

    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        missing = np.maximum(1 - y * scores, 0)
        return missing * missing, -2 * y * missing

    def curvature_product(self, y: Array, scores: Array, direction: Array) -> Array:
        return np.where(y * scores < 1, 2 * direction, 0.0)


class PerceptronLoss(TwoClassLoss):
    """max(0, -y s): rows on the right side of the boundary cost nothing; y is -1 or 1. Minimize it with `SGD`."""

    def values_and_slopes(self, y: Array, scores: Array) -> tuple[Array, Array]:
        margins = y * scores
        return np.maximum(-margins, 0), np.where(margins <= 0, -y, 0.0)


def _softmax(scores: Array) -> tuple[Array, Array]:
    """Return each row's probabilities, and the logarithm of the sum of the exponentials of its scores."""
    largest = scores.max(axis=1, keepdims=True)
    powers = np.exp(scores - largest)
    sums = powers.sum(axis=1, keepdims=True)
    powers /= sums
    return powers, (np.log(sums) + largest)[:, 0]
