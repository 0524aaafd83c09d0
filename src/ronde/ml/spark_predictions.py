"""Predictions of a fitted estimator for the rows of a Spark data frame, made by the executors in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from ronde.data.needs import need
from ronde.errors import UsageError
from ronde.ml.row_predictions import OutputKind, as_matrix, output_kind, without_feature_names
from ronde.ml.saving import from_bytes, to_bytes
from ronde.spark.columns import as_arrays

__all__ = ["with_predictions"]

Array = NDArray[Any]

ARRAY = "array<double>"
TYPES: Mapping[OutputKind, str] = {
    "cluster": "int",
    "integer": "double",  # as the labels of Spark ML are
    "number": "double",
    "text": "string",
    "numbers": ARRAY,
}
_TEMPORARY = "ronde predictions"


@dataclass(frozen=True)
class _Output:
    """A column that is added: its name, the method of the estimator, and its type in Spark."""

    column: str
    method: str
    type: str


def with_predictions(
    frame: DataFrame, estimator: Any, features: str, columns: Mapping[str, str]
) -> DataFrame:
    """Return the data frame with further columns.

    `features`: a column of numbers, arrays or vectors; `columns`: names by method of the estimator, "" for none. A
    method that the estimator lacks adds no column.

    Raises UsageError if `features` is missing, or one of the others is there already.
    """
    estimator = without_feature_names(estimator)
    outputs = [
        _Output(column, method, _type_of(estimator, method))
        for method, column in columns.items()
        if column and hasattr(estimator, method)
    ]
    if existing := [each.column for each in outputs if each.column in frame.columns]:
        raise UsageError(
            f"the data frame has the columns {existing} already: drop them, or give the predictions other names, as by "
            "setPredictionCol"
        )
    rows = as_arrays(frame, [features], "float64")[features]
    found = _function(to_bytes(estimator), features, outputs)(rows)
    names = [F.col(f"`{name}`") for name in frame.columns]
    added = [
        _as_column(F.col(f"`{_TEMPORARY}`").getField(f"output_{number}"), each).alias(each.column)
        for number, each in enumerate(outputs)
    ]
    return frame.withColumn(_TEMPORARY, found).select(*names, *added)


def _as_column(value: Column, output: _Output) -> Column:
    return array_to_vector(value) if output.type == ARRAY else value


def _type_of(estimator: Any, method: str) -> str:
    """Return the type of a method's result for one row."""
    return TYPES[output_kind(estimator, partial(_result, estimator, method))]


def _result(estimator: Any, method: str, X: Array) -> Array:
    """Return what the method returns; scores of two classes as two columns."""
    values: Array = np.asarray(getattr(estimator, method)(X))
    if method == "decision_function" and values.ndim == 1:
        return np.stack([-values, values], axis=1)
    return values


def _function(content: bytes, features: str, outputs: list[_Output]) -> Callable[..., Column]:
    """Return a pandas UDF from features to a struct of the outputs."""
    pandas = need("pandas", extra="spark-ml")

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pandas

        estimator = from_bytes(content, "the model")
        for batch in batches:
            X = as_matrix({features: batch}, estimator.n_features_in_, "frame.dropna()")
            yield pandas.DataFrame(
                {
                    f"output_{number}": _series(estimator, each, X, len(batch))
                    for number, each in enumerate(outputs)
                }
            )

    # Spark reads the types when it makes the function; as text it could not find pandas.
    iterator: Any = Iterator
    run.__annotations__ = {"batches": iterator[pandas.Series], "return": iterator[pandas.DataFrame]}
    fields = ", ".join(f"output_{number} {each.type}" for number, each in enumerate(outputs))
    made: Callable[..., Column] = F.pandas_udf(run, fields)
    return made


def _series(estimator: Any, output: _Output, X: Array, rows: int) -> Any:
    if not rows:
        return []
    values = _result(estimator, output.method, X)
    return list(values.astype(np.float64)) if output.type == ARRAY else values
