"""Rows of Spark and Dask data frames and Flink tables, for tasks that run where the rows are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ronde.comqueue.column_rows import ColumnRows
from ronde.comqueue.columns import ColumnSelection, ColumnsOption
from ronde.comqueue.rows import RowSource
from ronde.comqueue.task_group import TaskGroup
from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.clusters.platforms import ROWS
from ronde.parquet.needs import need
from ronde.parquet.reader import to_array
from ronde.parquet.rows import Columns

if TYPE_CHECKING:
    from collections.abc import Callable

    from ronde.launch.clusters.cluster import Cluster

__all__ = ["DaskRows", "FlinkRows", "SparkRows"]


class SparkRows:
    """The rows of a Spark data frame. `columns`, `memory_limit`: as of `read`.

    Raises UsageError for columns that are missing or hold no numbers.
    """

    def __init__(self, frame: Any, columns: ColumnsOption, memory_limit: int | None) -> None:
        from ronde.spark.columns import as_arrays, numeric_columns

        name = "the data frame"
        self._selection = ColumnSelection(columns, numeric_columns(frame), frame.columns, name)
        self._frame = frame.select(*as_arrays(frame, self._selection.names, "float64").values())
        self._limit = memory_limit

    def __repr__(self) -> str:
        return f"<SparkRows: {', '.join(self._selection.names)}>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does."""
        return self._selection.columns_of(part)

    def place(self, cluster: Cluster) -> None:
        """Have the tasks of the cluster run where the rows are. Raises UsageError if it is not that of the rows."""
        from ronde.spark.cluster import SparkCluster

        if not isinstance(cluster, SparkCluster):
            raise UsageError(
                f"the rows of a Spark data frame are not on this cluster, {type(cluster).__name__}: use on='spark' "
                "and a session that is not of Spark Connect, or read files"
            )
        cluster.take_rows(self._frame)

    def opener(self) -> Callable[[TaskGroup], RowSource]:
        """Return a function that each task calls for the rows that lie there. Can be pickled."""
        return partial(_open_rows, self._selection, self._limit, "the data frame")


class DaskRows:
    """The rows of a Dask data frame. `columns`, `memory_limit`: as of `read`.

    Raises UsageError for columns that are missing or hold no numbers.
    """

    def __init__(self, frame: Any, columns: ColumnsOption, memory_limit: int | None) -> None:
        from ronde.dask.frame_rows import column_names, numeric_columns

        if unnamed := [name for name in column_names(frame) if not isinstance(name, str)]:
            raise UsageError(
                f"the data frame has columns whose names are no strings, such as {unnamed[0]!r}: rename them"
            )
        self._selection = ColumnSelection(
            columns, numeric_columns(frame), column_names(frame), "the data frame"
        )
        self._frame, self._limit = frame[list(self._selection.names)], memory_limit

    def __repr__(self) -> str:
        return f"<DaskRows: {', '.join(self._selection.names)}>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does."""
        return self._selection.columns_of(part)

    def place(self, cluster: Cluster) -> None:
        """Have the tasks of the cluster run where the rows are. Raises UsageError if it is not a Dask cluster."""
        from ronde.dask.cluster import DaskCluster

        if not isinstance(cluster, DaskCluster):
            raise UsageError(
                f"the rows of a Dask data frame are not on this cluster, {type(cluster).__name__}: use on='dask'"
            )
        cluster.take_rows(self._frame)

    def opener(self) -> Callable[[TaskGroup], RowSource]:
        """Return a function that each task calls for the rows that lie there. Can be pickled."""
        return partial(_open_rows, self._selection, self._limit, "the data frame")


class FlinkRows:
    """The rows of a Flink table. `columns`, `memory_limit`: as of `read`.

    Raises UsageError for columns that are missing or hold no numbers.
    """

    def __init__(self, table: Any, columns: ColumnsOption, memory_limit: int | None) -> None:
        from ronde.flink.table_rows import check_columns, check_streams, column_names, numeric_columns

        self._selection = ColumnSelection(columns, numeric_columns(table), column_names(table), "the table")
        check_columns(table, self._selection.names)
        check_streams(table)
        self._table, self._limit = table, memory_limit

    def __repr__(self) -> str:
        return f"<FlinkRows: {', '.join(self._selection.names)}>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does."""
        return self._selection.columns_of(part)

    def place(self, cluster: Cluster) -> None:
        """Have the tasks of the cluster run where the rows are. Raises UsageError if it is not a Flink cluster."""
        from ronde.flink.cluster import FlinkCluster

        if not isinstance(cluster, FlinkCluster):
            raise UsageError(
                f"the rows of a Flink table are not on this cluster, {type(cluster).__name__}: use on='flink:N'"
            )
        cluster.take_rows(self._table, self._selection.names)

    def opener(self) -> Callable[[TaskGroup], RowSource]:
        """Return a function that each task calls for the rows that lie there. Can be pickled."""
        return partial(_open_rows, self._selection, self._limit, "the table")


def _open_rows(
    selection: ColumnSelection, memory_limit: int | None, name: str, group: TaskGroup
) -> RowSource:
    pieces = _ArrowPieces(environment()[ROWS], f"{name} on task {group.task_id}")
    own, _ = next(pieces.read(range(min(pieces.num_rows, 1)), 1, 0), (None, ""))
    samples = [sample for sample in group.allgather_object(own) if sample is not None]
    if not samples:
        raise UsageError(f"{name} has no rows: expected at least one")
    selection.learn(samples[0])
    return ColumnRows(pieces, selection, name, memory_limit)


class _ArrowPieces:
    """The columns of a file with a stream of Arrow record batches, which are mapped into the memory."""

    def __init__(self, path: str, name: str) -> None:
        pa = need("pyarrow", extra="spark")
        file = pa.memory_map(path)
        self._table = pa.ipc.open_stream(file).read_all() if file.size() else None
        self.num_rows = self._table.num_rows if self._table is not None else 0
        self._name = name

    def read(self, rows: range, piece_rows: int, row_bytes: int) -> Iterator[tuple[Columns, str]]:
        if self._table is None:
            return
        for batch in self._table.slice(rows.start, len(rows)).to_batches(max_chunksize=piece_rows):
            names = batch.schema.names
            yield {name: to_array(name, batch.column(name), self._name) for name in names}, self._name
