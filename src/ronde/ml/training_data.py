"""The arguments of `fit` as data for `iterate`, checked as scikit-learn's estimators check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight, validate_data

from ronde.light_dataclasses import dataclass

__all__ = ["TrainingData", "training_data"]

FLOATS = (np.float64, np.float32)


@dataclass(frozen=True)
class TrainingData:
    """Rows for `iterate`.

    Attributes:
        rows: `data` of `iterate`: `c.data` and the blocks have the attributes `X`, and `y` and `sample_weight` if they
            were given. X is a C-contiguous array or a CSR matrix, float64 or float32.
        num_rows: How many rows there are.
        num_features: How many columns X has.
        dtype: The dtype of X.
    """

    rows: Mapping[str, Any]
    num_rows: int
    num_features: int
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """How many numbers a step reads, for `place_of`."""
        return self.num_rows * self.num_features


def training_data(
    estimator: Any,
    X: Any,
    y: Any = "no_validation",
    sample_weight: Any = None,
    *,
    reset: bool = True,
    **options: Any,
) -> TrainingData:
    """Check X, y and sample_weight, and set `n_features_in_` and `feature_names_in_` of the estimator.

    `y`: "no_validation" if the estimator has no target. `reset`: False for a later `partial_fit`. `options`: of
    scikit-learn's `validate_data`, for example `accept_sparse="csr"`.

    Raises ValueError and TypeError, with scikit-learn's messages.
    """
    options = {"dtype": FLOATS, "order": "C", **options}
    if isinstance(y, str):
        rows = {"X": validate_data(estimator, X, reset=reset, **options)}
    else:
        rows = dict(zip(("X", "y"), validate_data(estimator, X, y, reset=reset, **options)))
    X = rows["X"]
    if sample_weight is not None:
        rows["sample_weight"] = _check_sample_weight(
            sample_weight, X, dtype=X.dtype, ensure_non_negative=True
        )
    return TrainingData(rows, X.shape[0], X.shape[1], X.dtype)
