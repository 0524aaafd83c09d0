"""The fit of `LinearRegression` and `Ridge`: which method, and its result as attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.linear.column_scaling import ColumnScaling, in_range, moments_of
from ronde.ml.linear.least_squares import least_squares
from ronde.ml.linear.linear_model import (
    FitReport,
    LinearModel,
    float_targets,
    regression_weights,
    weights_of_zeros,
)
from ronde.ml.linear.standardized_objective import StandardizedObjective
from ronde.ml.linear.target_scaling import target_scaling
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import LBFGS, LinearObjective
from ronde.ml.optimizers.optimizer import Record
from ronde.ml.progress import Progress
from ronde.ml.training_data import TrainingData, training_data

__all__ = ["MOST_COLUMNS", "fit_squares"]

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
    data.require_weight()

    def attributes_of(w: Array) -> Mapping[str, Any]:
        return regression_weights(w, fit_intercept, data.dtype, outputs, keeps_column)

    if data.num_features <= MOST_COLUMNS:
        progress = model._progress(None, data.for_callbacks)
        report = FitReport(progress, attributes_of)
        found = least_squares(data, alpha, fit_intercept, model.on, report)
        in_range(model, found.moments)
        weights, history = found.weights, found.history
    else:
        progress = model._progress(model.max_iter or MOST_STEPS, data.for_callbacks)
        weights, history = _descend(model, data, alpha, progress, attributes_of)
    model._set(attributes_of(weights))
    model.n_iter_ = len(history)
    model._end_fit(progress, history)


def _descend(
    model: LinearModel,
    data: TrainingData,
    alpha: float,
    progress: Progress,
    attributes_of: Callable[[Array], Mapping[str, Any]],
) -> tuple[Array, list[Record]]:
    """Return the weights that L-BFGS finds, and the records of its steps.

    It starts from coefficients of 0, and all its steps are sums of centered rows. So if several solutions exist, it
    finds the one with the least sum of squared coefficients, as scikit-learn does.
    """
    moments, fit_intercept = moments_of(model, data), model.fit_intercept
    # With one divisor for all columns, the sum of squared coefficients has the same least solution.
    divisor = float(np.sqrt(moments.variances.max(initial=0.0))) or 1.0
    columns = ColumnScaling(moments.means, np.full(data.num_features, divisor))
    targets = target_scaling(moments)

    def weights_for_rows(w: Array) -> Array:
        return targets.for_targets(columns.for_rows(w), fit_intercept)

    result = model._minimize(
        LBFGS(model.max_iter or MOST_STEPS, model.tol),
        StandardizedObjective(
            LinearObjective(
                SquaredLoss(), l2=alpha / (2 * data.total_weight), fit_intercept=model.fit_intercept
            ),
            columns,
        ),
        data.mapped(targets),
        weights_of_zeros(data.outputs, data.num_features + fit_intercept),
        progress,
        lambda w: attributes_of(weights_for_rows(w)),
        loss_factor=targets.scale**2,
    )
    return weights_for_rows(result.w), result.history
