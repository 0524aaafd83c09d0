"""`read`: describes rows in files, tables and arrays, which tasks divide among themselves."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.comm.arrays import check_not_masked
from ronde.comqueue.buffers import Buffers
from ronde.comqueue.cluster_rows import DaskRows, FlinkRows, SparkRows
from ronde.comqueue.columns import ColumnSelection, ColumnsOption
from ronde.comqueue.parquet_rows import parquet_rows
from ronde.comqueue.rows import LocatedRows, RowSource
from ronde.errors import UsageError
from ronde.parquet.needs import need
from ronde.parquet.reader import holds_numbers, to_array

__all__ = ["ArrayRows", "is_dask_frame", "is_flink_table", "read"]


class ArrayRows:
    """Arrays in memory as a source of rows.

    Args:
        arrays: An array, a CSR matrix, or `NamedArrays`.
        num_rows: The number of rows.
        selection: The columns of the table that the arrays come from (None: they come from no table).
        made_up: The columns whose names in the table are not strings, but for example numbers.
    """

    def __init__(
        self,
        arrays: Any,
        num_rows: int,
        selection: ColumnSelection | None = None,
        made_up: Collection[str] = (),
    ) -> None:
        self.num_rows = num_rows
        self._arrays, self._selection, self._made_up = arrays, selection, frozenset(made_up)

    def __repr__(self) -> str:
        return f"<ArrayRows: {self.num_rows} rows>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does; () unless the names of all of them are strings."""
        columns = self._selection.columns_of(part) if self._selection else ()
        return () if self._made_up.intersection(columns) else columns

    def load(self, begin: int, end: int) -> Any:
        """Return rows, which share the memory of the arrays."""
        return self._arrays[begin:end]


def read(
    source: Any,
    columns: ColumnsOption = None,
    *,
    memory_limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> RowSource | LocatedRows:
    """Return data for `iterate` or a queue: rows of Parquet files, of a table or of an array.

        data = read("s3://bucket/clicks/", columns={"X": ["age", "hour"], "y": "clicked"})
        iterate(step, data=data, ...)                       # the step gets c.data.X and c.data.y

    Each task reads its own rows. Files in a folder are read in the order of their names, so rows have the same numbers
    in each run.

    Args:
        source: One of these:
            - the path or fsspec URL of a Parquet file, of a folder (all files named *.parquet below it), or a pattern
              such as `data/2024-*.parquet`; or a list of these, whose rows follow each other;
            - a table: of pandas, Polars, PyArrow, or another object with the Arrow C interface (`__arrow_c_stream__`);
            - a Spark or Dask data frame or a Flink table, for tasks that run where its rows are: `on="spark"`,
              `on="dask"`, `on="flink:4"`;
            - an array: of NumPy, PyTorch (on the CPU), or another object that `numpy.asarray` takes; a SciPy matrix.
        columns: Which columns of files or of a table the step gets, and how. A list: a 2-d array of these columns;
            None: of all columns of numbers. A name: an array of the values of that column. A dict of these: several
            arrays, as attributes; None in it: of all columns of numbers that are not named. 2-d arrays have the
            dtype float32 if that represents all columns exactly, otherwise float64. A key in the paths of files, such
            as `year=2024`, is a column if you name it.
        memory_limit: The number of bytes that the rows of a task may take. If they need more, each step reads them
            block by block, and gets them only as `c.blocks` (default: half of the free memory of the task's machine or
            control group, divided by the number of tasks there). For files, and data on a cluster.
        options: Passed to fsspec's file system, such as `{"anon": True}` for S3 (default: none).

    Raises:
        UsageError: There are no rows; a column is missing, has another type in one of the files, or holds no numbers;
            or a package is not installed.
    """
    if paths := _paths_in(source):
        return parquet_rows(paths, columns, options, memory_limit)
    if options:
        raise UsageError(f"options={options!r} are for files, and the source is of type {_type(source)}")
    if hasattr(source, "mapInArrow"):
        return SparkRows(source, columns, memory_limit)
    if is_dask_frame(source):
        return DaskRows(source, columns, memory_limit)
    if is_flink_table(source):
        return FlinkRows(source, columns, memory_limit)
    if memory_limit is not None:
        raise UsageError(
            f"memory_limit is for files, and for data frames and tables on a cluster, not for a {_type(source)} in "
            "memory"
        )
    if hasattr(source, "__arrow_c_stream__"):
        return _table_rows(source, columns)
    if columns is not None:
        raise UsageError(f"columns={columns!r} needs names, and a source of type {_type(source)} has none")
    return _array_rows(source)


def is_dask_frame(source: Any) -> bool:
    """Return whether the source is a data frame of Dask."""
    return all(hasattr(source, name) for name in ("map_partitions", "to_delayed", "dtypes", "columns"))


def is_flink_table(source: Any) -> bool:
    """Return whether the source is a table of PyFlink."""
    return hasattr(source, "get_resolved_schema") and hasattr(source, "to_pandas")


def _paths_in(source: Any) -> list[str]:
    """Return the paths if the source consists of them."""
    given = source if isinstance(source, (list, tuple)) else [source]
    if all(isinstance(each, (str, os.PathLike)) for each in given):
        return [os.fspath(each) for each in given]
    return []


def _table_rows(source: Any, columns: ColumnsOption) -> ArrayRows:
    pa = need("pyarrow")
    try:
        table = pa.table(source)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(f"the source of type {_type(source)} is not a table: {error}") from None
    if not table.num_rows:
        raise UsageError(f"the table of type {_type(source)} has no rows: expected at least one")
    index = (table.schema.pandas_metadata or {}).get("index_columns", ())
    fields = [field for field in table.schema if field.name not in index]  # without the index of pandas
    numeric = [field.name for field in fields if holds_numbers(field.type)]
    name = f"the table of type {_type(source)}"
    selection = ColumnSelection(columns, numeric, [field.name for field in fields], name)
    found = {each: to_array(each, table.column(each), name) for each in selection.names}
    selection.learn(found)
    arrays = selection.empty(table.num_rows, Buffers(), table.num_rows)
    selection.fill(arrays, 0, found, slice(0, table.num_rows), name)
    return ArrayRows(selection.result(arrays), table.num_rows, selection, _made_up_names(source, fields))


def _made_up_names(source: Any, fields: Sequence[Any]) -> list[str]:
    """Return the names of the Arrow fields of columns whose names are not strings. Only pandas has such columns."""
    labels = source.columns if hasattr(source, "iloc") else [field.name for field in fields]
    return [field.name for field, label in zip(fields, labels) if not isinstance(label, str)]


def _array_rows(source: Any) -> ArrayRows:
    check_not_masked(source, "the source")
    rows = source.tocsr() if hasattr(source, "tocsr") else np.asarray(source)
    if not rows.ndim or rows.dtype.kind not in "biufc":
        raise UsageError(
            f"the source of type {_type(source)} has no rows of numbers: expected a path, a table, or an array"
        )
    if not rows.shape[0]:
        raise UsageError(f"the source of type {_type(source)} has no rows: expected at least one")
    return ArrayRows(rows, rows.shape[0])


def _type(source: Any) -> str:
    return type(source).__qualname__
