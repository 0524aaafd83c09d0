"""Row blocks for queues of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ronde.comqueue.block_sums import sum_over_blocks
from ronde.comqueue.blocks import TaskRows
from ronde.comqueue.buffers import Buffers
from ronde.comqueue.communication import CommunicateFunction
from ronde.comqueue.context import ComContext
from ronde.comqueue.functions import name_of
from ronde.comqueue.task_group import TaskGroup

__all__ = ["SumBlocks"]


class SumBlocks(CommunicateFunction):
    """Sum a function over the row blocks of all tasks; the sum has the same bits for any number of tasks.

        def partial_sums(context, points): ...             # some of the rows, not all of the task

        queue.add(SumBlocks("sums", partial_sums, of="points"))

    Args:
        name: The object that gets the sum, on all tasks.
        function: Gets the context and a block; returns an array, a number, or a tree of these. All its results have one
            structure, dtype and shape.
        of: The name of the partitioned data; or several names, of data with the same number of rows: a block then has
            them as attributes.
    """

    def __init__(
        self, name: str, function: Callable[[ComContext, Any], Any], of: str | Sequence[str]
    ) -> None:
        self.name = name
        self._function = function
        self._names = of if isinstance(of, str) else {each: each for each in of}
        self._rows: TaskRows | None = None
        self._buffers = Buffers()

    def __repr__(self) -> str:
        return f"SumBlocks({self.name!r}, {name_of(self._function)})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        if self._rows is None:
            self._rows = TaskRows(context, self._names)
        summands = (self._function(context, block) for block in self._rows.blocks)
        total = sum_over_blocks(summands, self._rows.division, group, self._buffers, name_of(self._function))
        context.put_obj(self.name, total)
