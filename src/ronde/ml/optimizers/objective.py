"""`Objective`: what an optimizer minimizes, as its user writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Objective"]

Array = NDArray[Any]


class Objective(ABC):
    """A function of weights w that is a sum over rows, and penalties on w. Derive from it and write one method.

        class Poisson(Objective):                      # counts y with the mean exp(X w)
            def loss_and_gradient(self, block, w):
                scores = block.X @ w
                means = np.exp(scores)
                return (means - block.y * scores).sum(), block.X.T @ (means - block.y)

        LBFGS().minimize(Poisson(), {"X": X, "y": y}, start=np.zeros(5), on="local:2").w

    The optimizers minimize

        sum of the rows' losses / sum of the rows' weights + l1 * sum |f_j w_j| + l2 * sum (f_j w_j)^2

    where the factors f are those of `penalty_factors`, usually 1. A block has consecutive rows of the data: an array,
    or for data given as a dict its arrays as attributes. Objects of the class travel to the tasks, by pickle.

    Attributes:
        l1: The factor of the sum of absolute values (0).
        l2: The factor of the sum of squares (0).
    """

    l1: float = 0.0
    l2: float = 0.0

    @abstractmethod
    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        """Return the sum of the losses of the block's rows, each times its weight, and the gradient of this sum.

        Args:
            block: Some rows of the data.
            w: The weights, float64, of any shape. Leave them as they are.

        Returns:
            A number, and an array of the shape of w. Both without penalties.

        Raises:
            Exception: Any. `minimize` ends with a RemoteError that shows it.
        """

    def losses(self, block: Any, points: Array) -> Array:
        """Return the sums of the losses at several points: a line search asks for them.

        Args:
            block: Some rows of the data.
            points: Several w, along the first axis.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        return np.array([self.loss_and_gradient(block, point)[0] for point in points])

    def total_weight(self, block: Any) -> float:
        """Return the sum of the weights of the block's rows; unless overridden, their number.

        Args:
            block: Some rows of the data.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        rows = next(iter(vars(block).values())) if isinstance(block, SimpleNamespace) else block
        return float(rows.shape[0] if hasattr(rows, "shape") else len(rows))

    def penalty_factors(self, w: Array) -> Array:
        """Return the factors of the weights in the penalties, not negative: 1, and 0 for an intercept.

        Args:
            w: The weights.

        Returns:
            An array of the shape of w.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        return np.ones_like(w)

    def gradient_norm(self, gradient: Array) -> float:
        """Return the number that `tol` limits, and that records have: unless overridden, the largest component.

        Args:
            gradient: Of the objective with its penalties, of the shape of w.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        return float(np.max(np.abs(gradient), initial=0.0))

    def hessian(self, block: Any, w: Array) -> Array:
        """Return the matrix of second derivatives of the sum of losses. Only `Newton` asks for it, if w is small.

        Args:
            block: Some rows of the data.
            w: The weights.

        Returns:
            Shape (w.size, w.size), in the order of `w.ravel()`.

        Raises:
            NotImplementedError: The objective has none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method hessian: write it, or use LBFGS, which needs only gradients"
        )

    def hessian_product(self, block: Any, w: Array, direction: Array) -> Array:
        """Return the product of this matrix with a direction. Only `Newton` asks for it, if w is large.

        Args:
            block: Some rows of the data.
            w: The weights.
            direction: Of the shape of w, as the product.

        Raises:
            NotImplementedError: The objective has none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method hessian_product: write it, or use LBFGS, which needs only gradients"
        )
