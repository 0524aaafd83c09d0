"""`LinearRegression`: ordinary least squares."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar, Self

from sklearn.base import MultiOutputMixin
from sklearn.utils._param_validation import Interval

from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.linear.linear_model import LinearRegressor
from ronde.ml.linear.squares_fit import fit_squares

__all__ = ["LinearRegression"]


class LinearRegression(MultiOutputMixin, LinearRegressor):
    """Least squares: the coefficients with the least sum over rows of weight * (prediction - y)^2.

        model = LinearRegression(on="local:2").fit(X, y)

    Args:
        fit_intercept: Whether there is an intercept.
        tol: With more than 1,000 columns, the largest component of the gradient at which the fit ends, for targets and
            the largest column with variance 1.
        max_iter: With more than 1,000 columns, the largest number of steps.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: Shape (features,), or (outputs, features) if y has two dimensions.
        intercept_: A number; shape (outputs,) if y has two dimensions; 0.0 without intercepts.
        n_iter_: The number of steps.
        history_: A `History` with `step` and `loss`, half the mean square.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "fit_intercept": ["boolean"],
        "tol": [Interval(Real, 0, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_iter: int = 1000,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.fit_intercept, self.tol, self.max_iter = fit_intercept, tol, max_iter
        self.on, self.verbose = on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix; or the path of Parquet files, a
                Spark data frame, or what `ronde.comqueue.read` returns.
            y: Shape (rows,) or (rows, outputs); or the name of a column of X.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together, or contain NaN or infinity.
            RemoteError: A task failed.
        """
        fit_squares(self, X, y, sample_weight, alpha=0.0, keeps_column=True)
        return self
