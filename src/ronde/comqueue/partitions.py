"""Which rows of the data each task gets, and how the functions of a queue see them: whole, and as row blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from ronde.comqueue.functions import ComContext
from ronde.comqueue.row_blocks import RowDivision, divide_partitions, divide_rows
from ronde.comqueue.task_group import TaskGroup
from ronde.data.rows import (
    SAME_ROWS,
    NamedArrays,
    RowSource,
    SourceRows,
    is_source,
    row_count,
    rows_between,
    take_rows,
)
from ronde.errors import UsageError

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = [
    "CommonData",
    "LocatedRows",
    "Partitions",
    "RowBlocks",
    "TaskData",
    "TaskRows",
    "check_same_rows",
    "divide_data",
    "is_located",
    "load_data",
]


@runtime_checkable
class LocatedRows(Protocol):
    """Rows that the tasks of a cluster already have, and that do not pass through this process."""

    def place(self, cluster: Cluster) -> None:
        """Make the tasks of the cluster run where the rows are.

        Args:
            cluster: The cluster of the next run.

        Raises:
            UsageError: The rows are not there.
        """

    def opener(self) -> Callable[[TaskGroup], RowSource]:
        """Return a function that all tasks call, at the same time, to get their rows. It can be pickled.

        Raises nothing.
        """


def is_located(data: Any) -> TypeGuard[LocatedRows]:
    """Return whether data are `LocatedRows`, in less time than `isinstance` takes."""
    return hasattr(data, "place") and hasattr(data, "opener")


class Partitions:
    """Data that are already divided: task i gets partition i. The numbers of partitions and tasks must be equal.

        Partitions([rows_of_task_0, rows_of_task_1])

    Args:
        parts: The partitions, by task; any objects.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def __repr__(self) -> str:
        return f"<Partitions: {len(self.parts)}>"


@dataclass(frozen=True)
class CommonData:
    """What all tasks get: broadcast objects, sources of rows, and how rows are divided; all by name.

    `openers`: of rows that the tasks have; `divisions`: of data that are divided here. A task asks the others for those
    of `Partitions` and of such rows. `rows_per_block`: how many rows a block has at least.
    """

    broadcast: Mapping[str, Any]
    sources: Mapping[str, RowSource] = field(default_factory=dict)
    openers: Mapping[str, Callable[[TaskGroup], RowSource]] = field(default_factory=dict)
    divisions: Mapping[str, RowDivision] = field(default_factory=dict)
    rows_per_block: int = 1


@dataclass(frozen=True)
class TaskData:
    """The partitioned data of one task, by name. `divisions`: of those that have rows."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    divisions: Mapping[str, RowDivision] = field(default_factory=dict)


def divide_data(
    broadcast: Mapping[str, Any], partitioned: Mapping[str, Any], num_tasks: int, rows_per_block: int = 1
) -> tuple[CommonData, list[Mapping[str, Any]]]:
    """Return what all tasks get, and the parts of each task: consecutive rows, in whole row blocks.

    Raises UsageError if data have no rows, or the number of partitions is not that of the tasks.
    """
    sources, openers, divisions = {}, {}, {}
    parts: list[dict[str, Any]] = [{} for _ in range(num_tasks)]
    for name, data in partitioned.items():
        if isinstance(data, Partitions):
            if len(data.parts) != num_tasks:
                raise UsageError(
                    f"{name!r} has {len(data.parts)} partitions for {num_tasks} tasks: expected one for each task"
                )
            for part, rows in zip(parts, data.parts):
                part[name] = rows
            continue
        if is_located(data):
            openers[name] = data.opener()
            continue
        # SciPy selects no rows in other formats.
        if hasattr(data, "tocsr") and data.format not in ("csr", "csc"):
            data = data.tocsr()
        divisions[name] = division = divide_rows(_count_of(data, name), num_tasks, rows_per_block)
        if is_source(data):
            sources[name] = data
            continue
        for task, part in enumerate(parts):
            numbers = division.rows_of(task)
            part[name] = rows_between(data, numbers.start, numbers.stop)
    return CommonData(broadcast, sources, openers, divisions, rows_per_block), list(parts)


def _count_of(data: Any, name: str) -> int:
    count = row_count(data, name)
    if count < 1:
        raise UsageError(f"{name!r} has no rows: expected at least one")
    return count


def check_same_rows(partitioned: Mapping[str, Any]) -> None:
    """Raise UsageError if data that are used together have different numbers of rows, as far as this process knows.

    It does not know the rows of `LocatedRows`, and of data beside `Partitions` not those of each task: see `TaskRows`.
    """
    counts = {name: _counts_of_parts(data, name) for name, data in partitioned.items()}
    known = [(name, rows) for name, rows in counts.items() if rows is not None]
    for (name, rows), (other_name, other_rows) in pairwise(known):
        if sum(rows) != sum(other_rows) or (len(rows) == len(other_rows) and rows != other_rows):
            raise UsageError(
                f"{name!r} and {other_name!r} have {_as_text(rows)} and {_as_text(other_rows)} rows: {SAME_ROWS}"
            )


def _counts_of_parts(data: Any, name: str) -> list[int] | None:
    """Return the numbers of rows of the partitions, or that of the whole. None: not known, or no rows."""
    if is_located(data):
        return None
    if not isinstance(data, Partitions):
        return [row_count(data, name)]
    counts = [count for part in data.parts if (count := _rows_or_none(part)) is not None]
    return counts if len(counts) == len(data.parts) else None


def _as_text(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else str(list(counts))


def load_data(common: CommonData, parts: Mapping[str, Any], group: TaskGroup, is_read_only: bool) -> TaskData:
    """Return the partitioned data of a task: its parts, and the rows of sources, which it reads now.

    A source that is not to be held in memory becomes `SourceRows`. All tasks call this.
    """
    objects, divisions = dict(parts), dict(common.divisions)
    for name, source in common.sources.items():
        objects[name] = take_rows(source, divisions[name].rows_of(group.task_id), group.tasks_here)
    for name, open_rows in common.openers.items():
        source = open_rows(group)
        divisions[name] = divide_partitions(group.allgather_object(source.num_rows), common.rows_per_block)
        objects[name] = take_rows(source, range(source.num_rows), group.tasks_here)
    for name in sorted(objects.keys() - divisions.keys()):
        counts = group.allgather_object(_rows_or_none(objects[name]))
        if None not in counts and any(counts):
            divisions[name] = divide_partitions(counts, common.rows_per_block)
    if is_read_only:
        objects = {name: _read_only(rows) for name, rows in objects.items()}
    return TaskData(objects, divisions)


def _read_only(rows: Any) -> Any:
    """Return the same rows; arrays as views that cannot be written to."""
    if isinstance(rows, NamedArrays):
        return NamedArrays({name: _read_only(array) for name, array in vars(rows).items()})
    if isinstance(rows, np.ndarray):
        rows = rows.view()
        rows.flags.writeable = False
    return rows


def _rows_or_none(data: Any) -> int | None:
    try:
        return row_count(data, "")
    except UsageError:
        return None


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
