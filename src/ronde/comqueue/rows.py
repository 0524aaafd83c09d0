"""What counts as rows, and how a task gets some of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ronde.errors import UsageError
from ronde.light_dataclasses import dataclass

__all__ = ["RowSource", "SourceRows", "row_count", "rows_between"]


@runtime_checkable
class RowSource(Protocol):
    """Rows that tasks read themselves. Give an object with these attributes as data of a queue.

        class Table:                                       # rows of a file; each task reads its own
            def __init__(self, path):
                self.path, self.num_rows = path, np.load(path, mmap_mode="r").shape[0]

            def load(self, begin, end):
                return np.load(self.path, mmap_mode="r")[begin:end]

    It is pickled for tasks in other processes, and shared by tasks that are threads. An attribute `in_memory` that is
    False makes each step read its rows block by block instead of once.

    Attributes:
        num_rows: How many rows there are.
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


@dataclass(frozen=True)
class SourceRows:
    """Some rows of a source, which are read when they are needed. `numbers`: of the rows."""

    source: RowSource
    numbers: range

    @property
    def in_memory(self) -> bool:
        """Whether the rows fit in memory, and are read once."""
        return bool(getattr(self.source, "in_memory", True))

    def load(self) -> Any:
        """Return the rows in memory."""
        return self.source.load(self.numbers.start, self.numbers.stop)


def row_count(data: Any, name: str) -> int:
    """Return how many rows the data have. `name`: for the error. Raises UsageError if they have none by their type."""
    if isinstance(data, SourceRows):
        return len(data.numbers)
    if isinstance(data, RowSource):
        return data.num_rows
    if isinstance(data, (list, tuple)):
        return len(data)
    if shape := getattr(data, "shape", ()):
        return int(shape[0])
    raise UsageError(
        f"{name!r} is of type {type(data).__qualname__}, which has no rows: expected an array, a data frame, a "
        "table, a list, a RowSource, or Partitions"
    )


def rows_between(data: Any, begin: int, end: int) -> Any:
    """Return consecutive rows of the same type. Those of an array share its memory; those of a source are read."""
    if isinstance(data, SourceRows):
        return data.source.load(data.numbers.start + begin, data.numbers.start + end)
    if hasattr(data, "iloc"):  # pandas, whose [] selects columns
        return data.iloc[begin:end]
    if hasattr(data, "slice") and hasattr(data, "schema"):  # an Arrow table, whose [] copies
        return data.slice(begin, end - begin)
    return data[begin:end]
