"""The names of the features of rows in files and tables, which scikit-learn finds only in data frames."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from ronde.data.needs import need

__all__ = ["check_features"]


def check_features(estimator: Any, source: Any, num_features: int, reset: bool) -> None:
    """Set `n_features_in_` and `feature_names_in_` from the rows of a source, or compare them with these.

    Rows without names of columns remove `feature_names_in_`. Raises ValueError as scikit-learn does for a data frame.
    """
    names = _feature_names(source)
    stand_in: Any = np.empty((0, num_features))
    if len(set(names)) == num_features:  # otherwise columns contain lists, or names are unknown
        stand_in = need("pyarrow").table({name: np.empty(0) for name in names})
    validate_data(estimator, stand_in, reset=reset, skip_check_array=True)


def _feature_names(source: Any) -> list[str]:
    """Return the names of the columns of part X; none if they are unknown."""
    # What `read` makes of files, of tables and of rows on a cluster; a user's source need not have columns.
    columns_of = getattr(source, "columns_of", None)
    return list(columns_of("X")) if columns_of else []
