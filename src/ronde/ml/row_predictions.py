"""Predictions for rows of a table: what kind they are, and the matrix that an estimator gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_clusterer

from ronde.errors import UsageError

__all__ = ["OutputKind", "as_matrix", "output_kind", "without_feature_names"]

Array = NDArray[Any]

OutputKind = Literal["cluster", "integer", "number", "text", "numbers"]


def output_kind(estimator: Any, predict: Callable[[Array], Array]) -> OutputKind:
    """Return what `predict`, a method of a fitted estimator, gives for one row; "numbers" are several of them."""
    sample = np.asarray(predict(np.ones((1, estimator.n_features_in_))))
    if sample.ndim == 2:
        return "numbers"
    if is_clusterer(estimator):
        return "cluster"
    if sample.dtype.kind in "biu":
        return "integer"
    return "number" if sample.dtype.kind == "f" else "text"


def without_feature_names(estimator: Any) -> Any:
    """Return a copy of a fitted estimator that takes a matrix without the warning that its columns have no names."""
    unnamed = copy(estimator)
    vars(unnamed).pop("feature_names_in_", None)
    return unnamed


def as_matrix(columns: Mapping[str, Any], width: int, remedy: str) -> Array:
    """Return columns of numbers, or of arrays of them, next to each other as float64.

    `columns`: series of pandas by name; `width`: that of the result; `remedy`: how to remove rows
    with missing values.

    Raises UsageError if they do not form such a matrix.
    """
    for name, series in columns.items():
        if series.isna().any():
            raise UsageError(f"column {name!r} has missing values: remove these rows, as by {remedy}")
    if not all(map(len, columns.values())):
        return np.empty((0, width))
    try:
        parts = [
            np.asarray(np.stack(series.to_numpy()), np.float64).reshape(len(series), -1)
            for series in columns.values()
        ]
    except ValueError:
        names = ", ".join(map(repr, columns))
        raise UsageError(
            f"the rows of column {names} have different lengths: expected {width} numbers in each"
        ) from None
    return np.concatenate(parts, axis=1)
