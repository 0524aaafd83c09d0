"""`Lasso`: least squares with a penalty on absolute values."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from ronde.ml.base import fitting
from ronde.ml.linear.elastic_net import ElasticNet, fit_elastic_net
from ronde.ml.linear.linear_model import LinearRegressor

__all__ = ["Lasso"]


class Lasso(LinearRegressor):
    """Least squares with a penalty that makes coefficients exactly 0.

        mean over rows of (prediction - y)^2 / 2  +  alpha * |w|_1

    The mean is a weighted one. The optimizer is OWL-QN, so scale the columns of X alike.

    Args:
        alpha: The factor of the penalty. The intercept is not penalized.
        fit_intercept: Whether there is an intercept.
        max_iter: The largest number of steps.
        tol: The largest component of the gradient at which the fit ends.
        warm_start: Whether a second fit starts from the coefficients of the first.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: Shape (features,).
        intercept_: A number.
        n_iter_: The number of steps.
        history_: As of `ElasticNet`.
    """

    _parameter_constraints: ClassVar = {
        name: constraints
        for name, constraints in ElasticNet._parameter_constraints.items()
        if name != "l1_ratio"
    }

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-6,
        warm_start: bool = False,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.max_iter, self.tol, self.warm_start = max_iter, tol, warm_start
        self.on, self.verbose = on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix.
            y: Shape (rows,).
            sample_weight: Shape (rows,), not negative (None: 1 for each row).

        Raises:
            ValueError: The arguments do not fit together, or contain NaN or infinity.
            RemoteError: A task failed.
        """
        fit_elastic_net(self, X, y, sample_weight, l1_ratio=1.0)
        return self
