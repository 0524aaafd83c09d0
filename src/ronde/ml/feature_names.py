"""The names of the features of rows in files and tables, which scikit-learn finds only in data frames."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from ronde.comqueue import RowSource
from ronde.parquet.needs import need
from ronde.parquet.reader import holds_numbers

__all__ = ["TableRows", "check_features", "numeric_columns"]


class TableRows:
    """The rows of a table in memory, with the names of the columns of part X.

    Args:
        source: The rows.
        feature_names: The names.
    """

    def __init__(self, source: RowSource, feature_names: list[str]) -> None:
        self.num_rows, self.feature_names = source.num_rows, feature_names
        self._source = source

    def __repr__(self) -> str:
        return repr(self._source)

    def load(self, begin: int, end: int) -> Any:
        """Return rows as the source does."""
        return self._source.load(begin, end)


def numeric_columns(table: Any) -> list[str]:
    """Return the names of the columns of numbers of a table of pandas, Polars or PyArrow.

    They are those that `ronde.comqueue.read` takes for the part `None`.
    """
    pa, pandas = need("pyarrow"), sys.modules.get("pandas")
    is_pandas = pandas is not None and isinstance(table, pandas.DataFrame)
    # PyArrow would copy some columns of pandas, but shares the memory of other tables.
    schema = pa.Schema.from_pandas(table) if is_pandas else pa.table(table).schema
    index = (schema.pandas_metadata or {}).get("index_columns", ())
    return [field.name for field in schema if field.name not in index and holds_numbers(field.type)]


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
    if isinstance(source, TableRows):
        return source.feature_names
    # What `read` makes of files and of rows on a cluster; a user's source need not have columns.
    columns_of = getattr(source, "columns_of", None)
    return list(columns_of("X")) if columns_of else []
