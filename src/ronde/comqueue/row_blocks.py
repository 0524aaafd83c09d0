"""Row blocks: the units in which the rows of the data are given to tasks. Pure.

How many blocks there are depends on the number of rows only, and on how many rows the caller wants in a block. Each
task gets consecutive whole blocks. So what is computed for each block, and combined along a tree over the blocks
(`comqueue/sum_tree`), does not depend on the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ronde.comm.splits import even_split

__all__ = ["RowDivision", "block_count", "divide_partitions", "divide_rows"]

LEAST_BLOCKS = 64  # if there are as many rows, so that as many tasks have work
MOST_ROWS = 8192  # of a block


@dataclass(frozen=True)
class RowDivision:
    """How many rows and blocks each task has, by task.

    `is_common`: whether the blocks of all tasks divide all rows evenly, otherwise those of each task its rows. No block
    is empty.
    """

    rows: Sequence[int]
    blocks: Sequence[int]
    is_common: bool = True

    @property
    def num_rows(self) -> int:
        """How many rows all tasks have."""
        return sum(self.rows)

    def rows_of(self, task: int) -> range:
        """Return the numbers of a task's rows among those of all tasks."""
        return _range_of(self.rows, task)

    def blocks_of(self, task: int) -> range:
        """Return the numbers of a task's blocks among those of all tasks."""
        return _range_of(self.blocks, task)

    def rows_of_blocks(self, task: int) -> list[range]:
        """Return the rows of each of a task's blocks, counted from the task's first row."""
        num_rows, num_blocks, first = self.rows[task], self.blocks[task], 0
        if self.is_common:
            num_rows, num_blocks, first = self.num_rows, sum(self.blocks), self.blocks_of(task).start
        begins = [
            _first_row(block, num_rows, num_blocks) for block in range(first, first + self.blocks[task] + 1)
        ]
        return [range(begin - begins[0], end - begins[0]) for begin, end in zip(begins, begins[1:])]


def _range_of(numbers: Sequence[int], task: int) -> range:
    begin = sum(numbers[:task])
    return range(begin, begin + numbers[task])


def block_count(num_rows: int, least_rows: int = 1) -> int:
    """Return into how many blocks so many rows are divided. `least_rows`: of a block, if there are as many.

    With fewer than 64 rows each row is a block. Else it is a power of two, the least one of at least 64 with which no
    block has more than 8,192 rows. If these blocks would have fewer than `least_rows` rows, there are fewer of them.
    """
    fewest = -(-num_rows // MOST_ROWS)
    if num_rows < LEAST_BLOCKS * least_rows and fewest < LEAST_BLOCKS:
        return max(num_rows // least_rows, fewest)
    return 1 << (max(LEAST_BLOCKS, fewest) - 1).bit_length()


def divide_rows(num_rows: int, num_tasks: int, least_rows: int = 1) -> RowDivision:
    """Return the division of rows into blocks, and of these among tasks, both even. `least_rows`: of a block."""
    num_blocks = block_count(num_rows, least_rows)
    blocks = even_split(num_blocks, num_tasks)
    ends = [_first_row(sum(blocks[: task + 1]), num_rows, num_blocks) for task in range(num_tasks)]
    return RowDivision([end - begin for begin, end in zip([0, *ends], ends)], blocks)


def _first_row(block: int, num_rows: int, num_blocks: int) -> int:
    """Return the first row of a block. The larger blocks lie among the smaller ones, so that tasks have equal rows."""
    return block * num_rows // num_blocks if num_blocks else 0


def divide_partitions(rows: Sequence[int], least_rows: int = 1) -> RowDivision:
    """Return the division of rows that lie at tasks already. `rows`: their numbers, by task; `least_rows`: of a block.

    Each task divides its own rows, so that the blocks depend on the tasks.
    """
    return RowDivision(list(rows), [block_count(each, least_rows) for each in rows], is_common=False)
