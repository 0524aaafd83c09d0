"""Columns of a data frame as numbers and arrays of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

from ronde.errors import UsageError

__all__ = ["as_arrays", "holds_nan", "lacks_values", "numeric_columns"]


def as_arrays(
    frame: DataFrame, columns: Sequence[str], vectors: Literal["float32", "float64"] = "float32"
) -> dict[str, Column]:
    """Return each column as numbers or arrays of them, by its name: Spark vectors become arrays of this type.

    Raises UsageError for a column that is missing or holds something else.
    """
    types = {field.name: field.dataType for field in frame.schema.fields}
    if missing := [name for name in columns if name not in types]:
        raise UsageError(f"the data frame lacks the columns {missing}: it has {list(types)}")
    found = {}
    for name in columns:
        column, kind = F.col(f"`{name}`"), types[name]
        if isinstance(kind, VectorUDT):
            column = F.when(column.isNotNull(), vector_to_array(column, vectors))  # which fails for a null
        elif (doubles := _with_doubles(kind)) != kind:
            column = column.cast(doubles)
        elif not _holds_numbers(kind):
            raise UsageError(
                f"column {name!r} has the type {kind.simpleString()}: expected numbers, Spark vectors or arrays of "
                "numbers; StringIndexer makes numbers of strings, and VectorAssembler a vector of columns"
            )
        found[name] = column.alias(name)
    return found


def numeric_columns(frame: DataFrame) -> list[str]:
    """Return the names of the columns of single numbers."""
    numbers = T.NumericType | T.BooleanType
    return [field.name for field in frame.schema.fields if isinstance(field.dataType, numbers)]


def lacks_values(column: Column, kind: Any) -> Column:
    """Return whether an array in this column, of this type, has a null inside; false for a null itself."""
    if not isinstance(kind, T.ArrayType) or not _may_lack_values(kind):
        return F.lit(False)

    def is_missing(value: Column) -> Column:
        return value.isNull() | lacks_values(value, kind.elementType)

    return F.coalesce(F.exists(column, is_missing), F.lit(False))


def _may_lack_values(kind: Any) -> bool:
    return isinstance(kind, T.ArrayType) and (kind.containsNull or _may_lack_values(kind.elementType))


def holds_nan(column: Column, kind: Any) -> Column:
    """Return whether a number in this column, of this type, or one of its array, is NaN or infinite."""
    least = most = column
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
        if isinstance(kind, T.ArrayType):
            column = F.flatten(column)
        least, most = F.array_min(column), F.array_max(column)  # Spark takes NaN for the largest number
    if not isinstance(kind, T.FractionalType):
        return F.lit(False)
    infinity = float("inf")
    return F.coalesce(F.isnan(most) | (most == infinity) | (least == -infinity), F.lit(False))


def _holds_numbers(kind: Any) -> bool:
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
    return isinstance(kind, T.NumericType | T.BooleanType)


def _with_doubles(kind: Any) -> Any:
    """Return the type with doubles in place of decimals."""
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_with_doubles(kind.elementType), kind.containsNull)
    return T.DoubleType() if isinstance(kind, T.DecimalType) else kind
