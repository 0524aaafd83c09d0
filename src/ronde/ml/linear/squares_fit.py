"""The fit of `LinearRegression` and `Ridge`: which method, and its result as attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep, iterate
from ronde.ml.linear.column_scaling import ColumnScaling, no_scaling
from ronde.ml.linear.least_squares import least_squares, row_means
from ronde.ml.linear.linear_model import (
    FitReport,
    LinearModel,
    float_targets,
    regression_weights,
    weights_of_zeros,
)
from ronde.ml.linear.standardized_objective import StandardizedObjective
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import LBFGS, LinearObjective
from ronde.ml.optimizers.optimizer import Record
from ronde.ml.progress import Progress
from ronde.ml.tasks import SingleThreadedStep, place_of
from ronde.ml.training_data import TrainingData, training_data

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
    scaling, start = _centering(data, model.fit_intercept, model.on)
    penalized = LinearObjective(
        SquaredLoss(), l2=alpha / (2 * data.total_weight), fit_intercept=model.fit_intercept
    )
    result = model._minimize(
        LBFGS(model.max_iter or MOST_STEPS, model.tol),
        StandardizedObjective(penalized, scaling),
        data,
        start,
        progress,
        lambda w: attributes_of(scaling.for_rows(w)),
    )
    return scaling.for_rows(result.w), result.history


def _centering(data: TrainingData, fit_intercept: bool, on: Any) -> tuple[ColumnScaling, Array]:
    """Return what centers the columns of X, and the first weights: 0, and for the intercept the mean of y.

    With centered columns this mean is the best intercept for any coefficients, so that it does not change.
    """
    start = weights_of_zeros(data.outputs, data.num_features + fit_intercept)
    if not fit_intercept:
        return no_scaling(data.num_features), start
    place = place_of(None if isinstance(data.rows, Mapping) else on, data.size)
    step = SingleThreadedStep(_means_step)
    means = iterate(step, data=data.rows, state={"means": None}, max_iter=1, on=place).state.means
    start[..., -1] = means.y.reshape(start.shape[:-1])
    return ColumnScaling(means.X, np.ones(data.num_features)), start


def _means_step(c: IterationStep) -> None:
    c.state.means = row_means(c, True)
