"""The rows of one task, whole and as row blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ronde.comqueue.context import ComContext
from ronde.comqueue.row_blocks import RowDivision
from ronde.comqueue.rows import SAME_ROWS, SourceRows, rows_between
from ronde.errors import UsageError

__all__ = ["RowBlocks", "TaskRows"]


class RowBlocks:
    """The row blocks of one task, in order. Each has the form of the task's data, with fewer rows.

        norms = [np.linalg.norm(block) for block in c.blocks]

    Iterate over it any number of times. Blocks of data that do not fit in memory are read each time.
    """

    def __init__(self, rows: TaskRows) -> None:
        self._rows = rows
        self._ranges = rows.division.rows_of_blocks(rows.task_id)

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Any]:
        if self._rows.is_streamed:
            return self._rows.cut(self._ranges)
        return iter(self._rows.cut_once(self._ranges))


class TaskRows:
    """Partitioned data of one task.

    `names`: the name of one object; or of several, by the attributes under which functions see them. Raises UsageError
    if several have different numbers of rows on a task.
    """

    def __init__(self, context: ComContext, names: str | Mapping[str, str]) -> None:
        self.task_id = context.task_id
        self._names = [names] if isinstance(names, str) else list(names.values())
        self._attributes = None if isinstance(names, str) else list(names)
        self._objects = [context.get_obj(name) for name in self._names]
        self._divisions = context.divisions
        self._cut: list[Any] | None = None  # here, not in RowBlocks: no cycle may keep the rows
        self._check_same_rows()

    @property
    def is_streamed(self) -> bool:
        """Whether some of the data are not in memory."""
        return bool(self._reasons)

    @property
    def _reasons(self) -> list[str]:
        return [each.reason for each in self._objects if isinstance(each, SourceRows)]

    @property
    def data(self) -> Any:
        """All rows. Raises UsageError if they do not fit in memory."""
        if self.is_streamed:
            raise UsageError(
                f"the data, {self.division.num_rows} rows, are not in memory, because {self._reasons[0]}: use "
                "`blocks` or `sum_blocks`, which read them block by block"
            )
        return self._joined(self._objects)

    @property
    def blocks(self) -> RowBlocks:
        """The row blocks. Raises UsageError as `division` does."""
        return RowBlocks(self)

    @property
    def division(self) -> RowDivision:
        """The common division of all the data. Raises UsageError if there is none."""
        for name in self._names:
            if name not in self._divisions:
                raise UsageError(f"{name!r} has no row blocks: its partitions are without rows")
        return self._divisions[self._names[0]]

    def cut(self, blocks: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of consecutive blocks, whose rows are counted from the first one of this task."""
        return map(self._joined, zip(*(_blocks_of(rows, blocks) for rows in self._objects)))

    def cut_once(self, blocks: Sequence[range]) -> list[Any]:
        """Return the rows of all blocks, the same objects each time."""
        if self._cut is None:
            self._cut = list(self.cut(blocks))
        return self._cut

    def _check_same_rows(self) -> None:
        known = [name for name in self._names if name in self._divisions]
        for name in known[1:]:
            first, other = self._divisions[known[0]], self._divisions[name]
            if other != first:
                raise UsageError(
                    f"{known[0]!r} and {name!r} have {list(first.rows)} and {list(other.rows)} rows on the tasks: "
                    f"{SAME_ROWS}"
                )

    def _joined(self, objects: Sequence[Any]) -> Any:
        if self._attributes is None:
            return objects[0]
        return SimpleNamespace(**dict(zip(self._attributes, objects)))


def _blocks_of(rows: Any, blocks: Sequence[range]) -> Iterator[Any]:
    if isinstance(rows, SourceRows):
        return rows.stream(blocks)
    return (rows_between(rows, each.start, each.stop) for each in blocks)
