"""Writes the columns of a data frame that ranks read as Parquet into the folder of a run."""

from __future__ import annotations

from typing import Any

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

from ronde.data.parquet_files import find_row_groups
from ronde.errors import UsageError
from ronde.parquet.store import RunFolder
from ronde.parquet.training import DataIndex
from ronde.spark.columns import as_arrays, holds_nan, lacks_values

__all__ = ["row_sizes", "write_frame"]

PART = "ronde_part"
ROW_GROUP_BYTES = 32 << 20  # a rank has one or two in memory, and shuffles their order


def write_frame(
    frame: DataFrame,
    run: RunFolder,
    columns: list[str],
    validation: float | str | None,
    seed: int,
    partitions: int | None,
) -> DataIndex:
    """Write these columns, each row for training or for validation; return the row groups.

    Args:
        frame: The data.
        run: The folder that gets them.
        columns: The names of the columns.
        validation: The fraction of rows for validation, or a column that is above 0 for them; None: none.
        seed: From which follows which rows are for validation.
        partitions: Into how many partitions the rows are dealt first; None: as they are.

    Raises:
        UsageError: A column is missing or no array, lacks values or has NaN, there are no rows, or this process does
            not find the files that Spark wrote.
    """
    arrays = as_arrays(frame, columns)
    part = F.when(_is_validation(frame, validation, seed), "validation").otherwise("train")
    selected = frame.select(*arrays.values(), part.alias(PART))
    if partitions is not None:
        selected = selected.repartition(partitions)
    seen = Observation()
    observed = selected.observe(seen, *_facts(selected, columns))
    url = f"{run.url}/data"
    writer = observed.write.mode("overwrite").option("parquet.block.size", ROW_GROUP_BYTES)
    writer.partitionBy(PART).parquet(url)
    facts = seen.get
    _check(facts, columns, validation)
    parts = ("train", "validation") if facts["validation"] else ("train",)
    found = [find_row_groups(f"{url}/{PART}={name}", columns, run.store.options) for name in parts]
    rows = sum(group.rows for groups in found for group in groups)
    if rows != facts["rows"]:
        raise UsageError(
            f"the executors have written {facts['rows']} rows into {url}, and the driver finds {rows}: the store must "
            "be a folder that the driver and all executors share, as HDFS, S3 or NFS are"
        )
    return DataIndex(url, found[0], found[1] if len(found) > 1 else [])


def row_sizes(frame: DataFrame, columns: list[str]) -> dict[str, int]:
    """Return how many values each column has in the first row, if the frame has rows, for columns that have a value."""
    row = frame.select(*as_arrays(frame, columns).values()).first()
    return {} if row is None else {name: _count(row[name]) for name in columns if row[name] is not None}


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _is_validation(frame: DataFrame, validation: float | str | None, seed: int) -> Column:
    if validation is None or validation == 0:
        return F.lit(False)
    if isinstance(validation, str):
        if validation not in frame.columns:
            raise UsageError(
                f"validation={validation!r} is not a column of the data frame: it has {frame.columns}"
            )
        return F.coalesce(F.col(f"`{validation}`").cast("double") > 0, F.lit(False))
    if not 0 < validation < 1:
        raise UsageError(
            f"validation={validation} is invalid: expected a fraction below 1 or a column's name"
        )
    return F.rand(seed) < validation


def _facts(frame: DataFrame, columns: list[str]) -> list[Column]:
    """Return columns that count rows and their faults, which Spark evaluates while it writes."""
    facts = [
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.sum((F.col(PART) == "validation").cast("long")), F.lit(0)).alias("validation"),
    ]
    for number, name in enumerate(columns):
        column = F.col(f"`{name}`")
        kind = frame.schema[name].dataType
        for fact, is_so in (
            ("missing", column.isNull()),
            ("inside", lacks_values(column, kind)),
            ("nan", holds_nan(column, kind)),
        ):
            facts.append(F.coalesce(F.sum(is_so.cast("long")), F.lit(0)).alias(f"{fact}_{number}"))
        if isinstance(kind, T.ArrayType):
            facts.append(F.min(F.size(column)).alias(f"least_{number}"))
            facts.append(F.max(F.size(column)).alias(f"most_{number}"))
    return facts


def _check(facts: dict[str, Any], columns: list[str], validation: float | str | None) -> None:
    for number, name in enumerate(columns):
        if missing := facts[f"missing_{number}"]:
            raise UsageError(
                f"column {name!r} has {missing} missing values: remove or fill them, as by df.dropna(subset=[{name!r}])"
            )
        if inside := facts[f"inside_{number}"]:
            raise UsageError(
                f"column {name!r} has {inside} rows with missing values inside their arrays: remove these rows, as by "
                f"df.filter('forall(`{name}`, v -> v is not null)'), or fill the values; df.dropna() keeps them"
            )
        if nan := facts[f"nan_{number}"]:
            raise UsageError(
                f"column {name!r} has {nan} rows with NaN or infinite values, with which the loss becomes NaN: remove "
                "these rows, or replace the values"
            )
        least, most = facts.get(f"least_{number}"), facts.get(f"most_{number}")
        if least != most:
            raise UsageError(
                f"column {name!r} has {least} to {most} values in a row: expected the same number"
            )
    if facts["rows"] == facts["validation"]:
        raise UsageError(
            f"no rows are left for training: the data frame has {facts['rows']} rows, {facts['validation']} of them "
            "for validation"
        )
    if validation and not facts["validation"]:
        raise UsageError(
            f"validation={validation!r} selects none of {facts['rows']} rows: give a larger fraction, or None"
        )
