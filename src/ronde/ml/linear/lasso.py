"""`Lasso`: least squares with a penalty on absolute values."""

from __future__ import annotations

from typing import Any, ClassVar

from ronde.ml.linear.elastic_net import ElasticNet

__all__ = ["Lasso"]


class Lasso(ElasticNet):
    """Least squares with a penalty that makes coefficients exactly 0.

        mean over rows of (prediction - y)^2 / 2  +  alpha * |w|_1

    It is `ElasticNet` with `l1_ratio=1`. The mean is a weighted one.

    Args:
        alpha: The factor of the penalty. The intercept is not penalized.
        fit_intercept: Whether there is an intercept.
        max_iter: The largest number of steps.
        tol: As of `ElasticNet`.
        warm_start: Whether a second fit starts from the coefficients of the first. Both need the same number of
            outputs and columns.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: As of `ElasticNet`.
        intercept_: As of `ElasticNet`.
        n_iter_: The number of steps.
        dual_gap_: As of `ElasticNet`.
        history_: As of `ElasticNet`.
    """

    _parameter_constraints: ClassVar = {
        name: constraints
        for name, constraints in ElasticNet._parameter_constraints.items()
        if name != "l1_ratio"
    }

    l1_ratio = 1.0  # no parameter here

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-6,
        warm_start: bool = False,
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.alpha, self.fit_intercept = alpha, fit_intercept
        self.max_iter, self.tol, self.warm_start = max_iter, tol, warm_start
        self.random_state, self.on, self.verbose = random_state, on, verbose
