"""The arguments of `fit` that name rows elsewhere: a path, a data frame or table on a cluster, columns."""

from __future__ import annotations

import os
from typing import Any

from ronde.comm.arrays import check_not_masked
from ronde.comqueue import LocatedRows, RowSource, read
from ronde.data.rows import is_dask_frame, is_flink_table

__all__ = ["as_rows", "check_in_memory", "is_on_cluster"]


def as_rows(X: Any, **others: Any) -> tuple[Any, ...]:
    """Return X and the other arguments. If X is a path, or a data frame or table on a cluster, or another argument is
    the name of a column of X, then X becomes a source of rows with all of them as parts, and the others None.

        X, y, sample_weight = as_rows(X, y=y, sample_weight=sample_weight)

    The part X has all columns of numbers that are not named; of a Spark data frame or a Flink table all columns that
    are not. Raises UsageError as `read` does, and ValueError.
    """
    for name, value in {"X": X, **others}.items():
        check_not_masked(value, name)
    names = {name: value for name, value in others.items() if isinstance(value, str)}
    columns = _columns_on_cluster(X)
    if not names and not isinstance(X, (str, os.PathLike)) and not columns and not is_dask_frame(X):
        return X, *others.values()
    for name, value in others.items():
        if value is not None and name not in names:
            raise ValueError(
                f"{name} is of type {type(value).__name__}, and the rows are those of a file or a table: give the "
                "name of a column"
            )
    # With vectors and arrays, which do not count as columns of numbers.
    features = [column for column in columns if column not in names.values()] or None
    source = read(X, {"X": features, **names} if names else features)
    return source, *(None for _ in others)


def _columns_on_cluster(X: Any) -> list[str]:
    """Return the columns of a Spark data frame or a Flink table; none of others."""
    if hasattr(X, "mapInArrow"):
        return list(X.columns)
    return list(X.get_resolved_schema().get_column_names()) if is_flink_table(X) else []


def is_on_cluster(X: Any) -> bool:
    """Return whether X stands for rows on a cluster: a data frame or table there, or what `read` makes of one."""
    return hasattr(X, "mapInArrow") or is_dask_frame(X) or is_flink_table(X) or isinstance(X, LocatedRows)


def check_in_memory(X: Any, method: str, remedy: str) -> None:
    """Raise ValueError if X is not in the memory of this process. `method`: what needs it; `remedy`: what to do."""
    check_not_masked(X, "X")
    if hasattr(X, "mapInArrow"):
        raise ValueError(
            f"{method} needs rows in memory, and those of a Spark data frame are on the cluster: predict there, by "
            "ronde.ml.spark.SparkModel(model).transform(frame)"
        )
    if is_dask_frame(X):
        raise ValueError(
            f"{method} needs rows in memory, and those of a Dask data frame are on the cluster: predict there, by "
            "frame.map_partitions(model.predict)"
        )
    if is_flink_table(X):
        raise ValueError(
            f"{method} needs rows in memory, and those of a Flink table are on the cluster: predict there, by "
            "ronde.ml.flink.with_predictions(table, model)"
        )
    if isinstance(X, (str, os.PathLike, RowSource, LocatedRows)):
        raise ValueError(f"{method} needs rows in memory, and X is {X!r}: {remedy}")
