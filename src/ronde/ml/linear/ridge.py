"""`Ridge`: least squares with a penalty on squares."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar, Self

from sklearn.base import MultiOutputMixin
from sklearn.utils._param_validation import Interval, StrOptions

from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import FittedForm, TextForm
from ronde.ml.linear.linear_model import LinearRegressor
from ronde.ml.linear.squares_fit import MOST_COLUMNS, fit_squares

__all__ = ["Ridge"]


class Ridge(MultiOutputMixin, LinearRegressor):
    """Least squares with a penalty: the sum over rows of weight * (prediction - y)^2, plus `alpha * |w|^2`.

        model = Ridge(alpha=10.0, on="local:2").fit(X, y)

    Args:
        alpha: The factor of the penalty. The intercept is not penalized.
        fit_intercept: Whether there is an intercept.
        tol: With more than 1,000 columns, the largest component of the gradient at which the fit ends, for targets and
            the largest column with variance 1.
        max_iter: With more than 1,000 columns, the largest number of steps (None: 1,000).
        solver: Has no effect: the solvers of scikit-learn, by whose names it goes ("auto"), find the same coefficients.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        coef_: Shape (features,), or (outputs, features) if y has several columns.
        intercept_: A number; shape (outputs,) if y has two dimensions; 0.0 without intercepts.
        n_iter_: The number of steps.
        solver_: The parameter `solver`; for "auto" the name of what this estimator does, "cholesky" for the normal
            equations or, with more than 1,000 columns, "lbfgs".
        history_: A `History` with `step` and `loss`, the objective divided by twice the sum of the weights.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "alpha": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "tol": [Interval(Real, 0, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "solver": [StrOptions({"auto", "svd", "cholesky", "lsqr", "sparse_cg", "sag", "saga", "lbfgs"})],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {**LinearRegressor._fitted_forms, "solver_": TextForm()}

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-6,
        max_iter: int | None = None,
        solver: str = "auto",
        random_state: Any = None,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.alpha, self.fit_intercept, self.tol, self.max_iter = alpha, fit_intercept, tol, max_iter
        self.solver = solver
        self.random_state, self.on, self.verbose = random_state, on, verbose

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
        fit_squares(self, X, y, sample_weight, self.alpha, keeps_column=False)
        used = "cholesky" if self.n_features_in_ <= MOST_COLUMNS else "lbfgs"
        self.solver_ = used if self.solver == "auto" else self.solver
        return self
