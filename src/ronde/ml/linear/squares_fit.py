"""The fit of `LinearRegression` and `Ridge`: which method, and its result as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.linear.least_squares import least_squares
from ronde.ml.linear.linear_model import FitReport, LinearModel, float_targets, split_weights
from ronde.ml.losses import SquaredLoss
from ronde.ml.optimizers import LBFGS, LinearObjective
from ronde.ml.training_data import training_data

__all__ = ["fit_squares"]

MOST_COLUMNS = 1000  # whose matrix of second moments is formed

Array = NDArray[Any]


def fit_squares(model: LinearModel, X: Any, y: Any, sample_weight: Any, alpha: float) -> None:
    """Set the fitted attributes: the minimum of the sum of weight * (prediction - y)^2, plus alpha * |w|^2."""
    data = training_data(
        model, X, y, sample_weight, accept_sparse="csr", y_numeric=True, multi_output=True
    ).mapped(float_targets)
    outputs = data.rows["y"].shape[1:] if isinstance(data.rows, Mapping) else ()

    def attributes_of(w: Array) -> Mapping[str, Any]:
        coef, intercept = split_weights(w, model.fit_intercept, data.dtype)
        return {"coef_": coef, "intercept_": intercept if outputs else float(intercept)}

    if data.num_features <= MOST_COLUMNS:
        progress = model._progress(None, data.for_callbacks)
        report = FitReport(progress, lambda w: attributes_of(w if outputs else w[0]))
        found = least_squares(data, alpha, model.fit_intercept, model.on, report)
        coef, intercept = found.coef.astype(data.dtype), found.intercept.astype(data.dtype)
        model.coef_ = coef if outputs else coef[0]
        model.intercept_ = intercept if outputs else float(intercept[0])
        history = found.history
    else:
        progress = model._progress(model.max_iter, data.for_callbacks)
        objective = LinearObjective(
            SquaredLoss(), l2=alpha / (2 * data.total_weight), fit_intercept=model.fit_intercept
        )
        start = np.zeros((*outputs, data.num_features + model.fit_intercept))
        optimizer = LBFGS(model.max_iter, model.tol)
        result = model._minimize(optimizer, objective, data, start, progress, attributes_of)
        model._set(attributes_of(result.w))
        history = result.history
    model.n_iter_ = len(history)
    model._end_fit(progress, history)
