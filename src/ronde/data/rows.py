"""The kinds of rows, how to count them and take some, and memory for blocks of them that is used again."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

__all__ = [
    "SAME_ROWS", "Buffers", "NamedArrays", "RowSource", "SourceRows", "StreamedSource", "is_dask_frame",
    "is_flink_table", "is_source", "row_count", "rows_between", "take_rows",
]  # fmt: skip

SAME_ROWS = "data that are used together must have the same number of rows on each task"


@runtime_checkable
class RowSource(Protocol):
    """Rows that tasks read themselves. Pass an object with these attributes as data of a queue.

        class Table:                                       # rows of a file; each task reads its own
            def __init__(self, path):
                self.path, self.num_rows = path, np.load(path, mmap_mode="r").shape[0]

            def load(self, begin, end):
                return np.load(self.path, mmap_mode="r")[begin:end]

    It is pickled for tasks in other processes, and shared by tasks that are threads. If it has an attribute `in_memory`
    that is False, each step reads its rows block by block. Sources may also have the methods of `StreamedSource`.

    Attributes:
        num_rows: The number of rows.
    """

    num_rows: int

    def load(self, begin: int, end: int) -> Any:
        """Return rows as an array, a SciPy matrix, a data frame, an Arrow table or a list.

        Args:
            begin: The number of the first row, from 0.
            end: The number after that of the last row. It may equal `begin`: the result then has no rows.

        Raises:
            Exception: Any exception ends all tasks.
        """


@runtime_checkable
class StreamedSource(RowSource, Protocol):
    """A source that is read block by block if its rows do not fit in memory."""

    def check_memory(self, rows: int, tasks_here: int) -> str:
        """Return why a task cannot keep this number of rows in memory; "" if it can.

        Args:
            rows: The number of rows.
            tasks_here: The number of tasks on this machine, which share its memory.

        Raises:
            Exception: As of `load`.
        """

    def stream(self, blocks: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of each block, as `load` does.

        Args:
            blocks: The numbers of rows; the blocks follow each other without gaps.

        Raises:
            Exception: As of `load`.
        """


class NamedArrays:
    """Arrays with the same number of rows, as attributes. A slice contains some rows of each array."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        vars(self).update(arrays)

    def __repr__(self) -> str:
        return f"<{', '.join(f'{name}: {array.shape}' for name, array in vars(self).items())}>"

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, rows: slice) -> NamedArrays:
        return NamedArrays({name: array[rows] for name, array in vars(self).items()})


@dataclass(frozen=True)
class SourceRows:
    """Some rows of a source, which each step reads. `numbers`: their numbers; `reason`: why they are not in memory."""

    source: RowSource
    numbers: range
    reason: str

    def stream(self, blocks: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of consecutive blocks, whose rows are counted from the first one here."""
        first = self.numbers.start
        if isinstance(self.source, StreamedSource):
            return self.source.stream([range(first + each.start, first + each.stop) for each in blocks])
        return (self.source.load(first + each.start, first + each.stop) for each in blocks)


def take_rows(source: RowSource, numbers: range, tasks_here: int) -> Any:
    """Return rows of a source in memory; or `SourceRows`, if the source is streamed.

    `tasks_here`: as of `StreamedSource.check_memory`.
    """
    reason = "" if getattr(source, "in_memory", True) else "`in_memory` of their source is False"
    if hasattr(source, "stream") and isinstance(source, StreamedSource):
        reason = source.check_memory(len(numbers), tasks_here)
    return SourceRows(source, numbers, reason) if reason else source.load(numbers.start, numbers.stop)


def is_source(data: Any) -> TypeGuard[RowSource]:
    """Return whether data are a `RowSource`, in less time than `isinstance` takes."""
    return hasattr(data, "load") and hasattr(data, "num_rows")


def row_count(data: Any, name: str) -> int:
    """Return how many rows the data have. `name`: for the error. Raises UsageError if they have none by their type."""
    if isinstance(data, SourceRows):
        return len(data.numbers)
    if is_source(data):
        return data.num_rows
    if isinstance(data, (list, tuple, NamedArrays)):
        return len(data)
    if shape := getattr(data, "shape", ()):
        return int(shape[0])
    raise UsageError(
        f"{name!r} is of type {type(data).__qualname__}, which has no rows: expected an array, a data frame, a "
        "table, a list, a RowSource, or Partitions"
    )


def rows_between(data: Any, begin: int, end: int) -> Any:
    """Return consecutive rows of the same type. Those of an array share its memory."""
    if hasattr(data, "iloc"):  # pandas, whose [] selects columns
        return data.iloc[begin:end]
    if hasattr(data, "slice") and hasattr(data, "schema"):  # an Arrow table, whose [] copies
        return data.slice(begin, end - begin)
    return data[begin:end]


def is_dask_frame(source: Any) -> bool:
    """Return whether the source is a data frame of Dask."""
    return all(hasattr(source, name) for name in ("map_partitions", "to_delayed", "dtypes", "columns"))


def is_flink_table(source: Any) -> bool:
    """Return whether the source is a table of PyFlink."""
    return hasattr(source, "get_resolved_schema") and hasattr(source, "to_pandas")


# Memory for blocks of rows, used again

LARGE = 1 << 16  # bytes; smaller arrays are not kept


def _references(buffers: list[NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(buffer) for buffer in buffers]


# The references to a buffer that only a list has. It is counted here because it depends on the version of Python.
UNUSED = _references([np.empty(0, np.uint8)])[0]


class Buffers:
    """Makes arrays for one task. An array's memory is reused when no view of the array is left."""

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []

    def empty(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array of one axis."""
        num_bytes = size * dtype.itemsize
        if num_bytes < LARGE:
            return np.empty(size, dtype)
        unused = [buffer for buffer, count in zip(self._kept, _references(self._kept)) if count == UNUSED]
        for buffer in unused:
            if buffer.nbytes == num_bytes:
                return buffer.view(dtype)
        ids = set(map(id, unused))  # all of other sizes
        self._kept = [buffer for buffer in self._kept if id(buffer) not in ids]
        self._kept.append(np.empty(num_bytes, np.uint8))
        return self._kept[-1].view(dtype)
