"""The fit of `LinearRegression` and `Ridge`: which method, and its result as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ronde.ml.linear.least_squares import least_squares
from ronde.ml.linear.linear_model import (
    FitReport,
    LinearModel,
    float_targets,
    regression_weights,
    weights_of_zeros,
)
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import LBFGS, LinearObjective
from ronde.ml.training_data import training_data

__all__ = ["fit_squares"]

MOST_COLUMNS = 1000  # whose matrix of second moments is formed
MOST_STEPS = 1000

Array = NDArray[Any]


def fit_squares(
    model: LinearModel, X: Any, y: Any, sample_weight: Any, alpha: float, keeps_column: bool
) -> None:
    """Set the fitted attributes: the minimum of the sum of weight * (prediction - y)^2, plus alpha * |w|^2.

    `keeps_column`: as of `regression_weights`.
    """
    data = training_data(model, X, y, sample_weight, accept_sparse="csr", y_numeric=True, multi_output=True)
    outputs, fit_intercept = data.outputs, model.fit_intercept
    data = data.mapped(float_targets)

    def attributes_of(w: Array) -> Mapping[str, Any]:
        return regression_weights(w, fit_intercept, data.dtype, outputs, keeps_column)

    if data.num_features <= MOST_COLUMNS:
        progress = model._progress(None, data.for_callbacks)
        report = FitReport(progress, attributes_of)
        found = least_squares(data, alpha, fit_intercept, model.on, report)
        weights, history = found.weights, found.history
    else:
        max_iter = model.max_iter or MOST_STEPS
        progress = model._progress(max_iter, data.for_callbacks)
        objective = LinearObjective(
            SquaredLoss(), l2=alpha / (2 * data.total_weight), fit_intercept=fit_intercept
        )
        start = weights_of_zeros(outputs, data.num_features + fit_intercept)
        optimizer = LBFGS(max_iter, model.tol)
        result = model._minimize(optimizer, objective, data, start, progress, attributes_of)
        weights, history = result.w, result.history
    model._set(attributes_of(weights))
    model.n_iter_ = len(history)
    model._end_fit(progress, history)
