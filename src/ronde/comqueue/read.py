"""`read`: describes rows in files, tables, arrays and data frames of clusters, which tasks divide among themselves."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ronde.comqueue.partitions import LocatedRows
from ronde.comqueue.task_group import TaskGroup
from ronde.data.columns import Columns, ColumnSelection, ColumnsOption, to_array
from ronde.data.needs import need
from ronde.data.rows import RowSource, is_dask_frame, is_flink_table
from ronde.data.sources import ColumnRows, array_rows, parquet_rows, table_rows
from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.clusters.platforms import ROWS

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["DaskRows", "FlinkRows", "SparkRows", "read"]


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
    kind = type(source).__qualname__
    if options:
        raise UsageError(f"options={options!r} are for files, and the source is of type {kind}")
    if hasattr(source, "mapInArrow"):
        return SparkRows(source, columns, memory_limit)
    if is_dask_frame(source):
        return DaskRows(source, columns, memory_limit)
    if is_flink_table(source):
        return FlinkRows(source, columns, memory_limit)
    if memory_limit is not None:
        raise UsageError(
            f"memory_limit is for files, and for data frames and tables on a cluster, not for a {kind} in memory"
        )
    if hasattr(source, "__arrow_c_stream__"):
        return table_rows(source, columns)
    if columns is not None:
        raise UsageError(f"columns={columns!r} needs names, and a source of type {kind} has none")
    return array_rows(source)


def _paths_in(source: Any) -> list[str]:
    """Return the paths if the source consists of them."""
    given = source if isinstance(source, (list, tuple)) else [source]
    if all(isinstance(each, (str, os.PathLike)) for each in given):
        return [os.fspath(each) for each in given]
    return []


class _ClusterRows(ABC):
    """Rows that the tasks of a cluster have already.

    `selection`: the columns that are read; `frame`: what the cluster takes; `memory_limit`: as of `read`; `name`: that
    of the frame, for messages.
    """

    def __init__(
        self, selection: ColumnSelection, frame: Any, memory_limit: int | None, name: str = "the data frame"
    ) -> None:
        self._selection, self._frame, self._limit, self._name = selection, frame, memory_limit, name
        self._nullable: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(self._selection.names)}>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does."""
        return self._selection.columns_of(part)

    def with_missing_values(self, part: str) -> Self:
        """Return the same rows, but nulls in columns of a part are NaN. `part`: as of `columns_of`."""
        rows = copy.copy(self)
        rows._nullable = self._selection.columns_only_of(part)
        return rows

    @abstractmethod
    def place(self, cluster: Cluster) -> None:
        """Have the tasks of the cluster run where the rows are. Raises UsageError if it is not that of the rows."""

    def opener(self) -> Callable[[TaskGroup], RowSource]:
        """Return a function that each task calls for the rows that it has. Can be pickled."""
        return partial(_open_rows, self._selection, self._limit, self._name, self._nullable)


class SparkRows(_ClusterRows):
    """The rows of a Spark data frame. `columns`, `memory_limit`: as of `read`.

    Raises UsageError for columns that are missing or hold no numbers.
    """

    def __init__(self, frame: Any, columns: ColumnsOption, memory_limit: int | None) -> None:
        from ronde.spark.columns import as_arrays, numeric_columns

        selection = ColumnSelection(columns, numeric_columns(frame), frame.columns, "the data frame")
        arrays = frame.select(*as_arrays(frame, selection.names, "float64").values())
        super().__init__(selection, arrays, memory_limit)

    def place(self, cluster: Cluster) -> None:
        from ronde.spark.cluster import SparkCluster

        if not isinstance(cluster, SparkCluster):
            raise UsageError(
                f"the rows of a Spark data frame are not on this cluster, {type(cluster).__name__}: use on='spark' "
                "and a session that is not of Spark Connect, or read files"
            )
        cluster.take_rows(self._frame)


class DaskRows(_ClusterRows):
    """The rows of a Dask data frame. `columns`, `memory_limit`: as of `read`.

    Raises UsageError for columns that are missing or hold no numbers.
    """

    def __init__(self, frame: Any, columns: ColumnsOption, memory_limit: int | None) -> None:
        from ronde.dask.frame_rows import column_names, numeric_columns

        names = column_names(frame)
        if unnamed := [name for name in names if not isinstance(name, str)]:
            raise UsageError(
                f"the data frame has columns whose names are no strings, such as {unnamed[0]!r}: rename them"
            )
        selection = ColumnSelection(columns, numeric_columns(frame), names, "the data frame")
        super().__init__(selection, frame[list(selection.names)], memory_limit)

    def place(self, cluster: Cluster) -> None:
        from ronde.dask.cluster import DaskCluster

        if not isinstance(cluster, DaskCluster):
            raise UsageError(
                f"the rows of a Dask data frame are not on this cluster, {type(cluster).__name__}: use on='dask'"
            )
        cluster.take_rows(self._frame)


class FlinkRows(_ClusterRows):
    """The rows of a Flink table. `columns`, `memory_limit`: as of `read`.

    Raises UsageError for columns that are missing or hold no numbers.
    """

    def __init__(self, table: Any, columns: ColumnsOption, memory_limit: int | None) -> None:
        from ronde.flink.table_rows import check_columns, check_streams, column_names, numeric_columns

        selection = ColumnSelection(columns, numeric_columns(table), column_names(table), "the table")
        check_columns(table, selection.names)
        check_streams(table)
        super().__init__(selection, table, memory_limit, "the table")

    def place(self, cluster: Cluster) -> None:
        from ronde.flink.cluster import FlinkCluster

        if not isinstance(cluster, FlinkCluster):
            raise UsageError(
                f"the rows of a Flink table are not on this cluster, {type(cluster).__name__}: use on='flink:N'"
            )
        cluster.take_rows(self._frame, self._selection.names)


def _open_rows(
    selection: ColumnSelection,
    memory_limit: int | None,
    name: str,
    nullable: frozenset[str],
    group: TaskGroup,
) -> RowSource:
    pieces = _ArrowPieces(environment()[ROWS], f"{name} on task {group.task_id}", nullable)
    own, _ = next(pieces.read(range(min(pieces.num_rows, 1)), 1, 0), (None, ""))
    samples = [sample for sample in group.allgather_object(own) if sample is not None]
    if not samples:
        raise UsageError(f"{name} has no rows: expected at least one")
    selection.learn(samples[0])
    return ColumnRows(pieces, selection, name, memory_limit)


class _ArrowPieces:
    """The columns of a file with a stream of Arrow record batches, which are mapped into the memory."""

    def __init__(self, path: str, name: str, nullable: frozenset[str]) -> None:
        pa = need("pyarrow", extra="spark")
        file = pa.memory_map(path)
        self._table = pa.ipc.open_stream(file).read_all() if file.size() else None
        self.num_rows = self._table.num_rows if self._table is not None else 0
        self._name, self.nullable = name, nullable

    def read(self, rows: range, piece_rows: int, row_bytes: int) -> Iterator[tuple[Columns, str]]:
        if self._table is None:
            return
        for batch in self._table.slice(rows.start, len(rows)).to_batches(max_chunksize=piece_rows):
            names = batch.schema.names
            columns = {
                name: to_array(name, batch.column(name), self._name, name in self.nullable) for name in names
            }
            yield columns, self._name
