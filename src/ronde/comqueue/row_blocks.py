"""Row blocks: the units in which tasks get the rows of the data, and the order of sums over them. Pure.

How many blocks there are depends on the number of rows only, and on how many rows the caller wants in a block. Each
task gets consecutive whole blocks. So what is computed for each block, and combined along a tree over the blocks, does
not depend on the tasks.

The leaves of the sum tree are the blocks, numbered from 0, in groups of eight. The leaves of a group are added in
order. The sums of the groups are added along a binary tree: pairs of groups, pairs of these pairs, and so on. A task
adds up its consecutive leaves to *nodes*: to the sums that occur on the way. The nodes of all tasks, in order, add up
to the same bits as the leaves of one task.

Adding in order takes one accumulator, which stays in the processor's cache. A tree down to the leaves would take twice
as long for large summands, because it copies every second one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ronde.comm.splits import even_split

__all__ = ["GROUP", "RowDivision", "SumTree", "block_count", "divide_partitions", "divide_rows", "nodes_of"]


LEAST_BLOCKS = 64  # if there are as many rows, so that as many tasks have work
MOST_ROWS = 8192  # of a block
GROUP = 8  # leaves

Summand = TypeVar("Summand")


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
    """Return the division of rows that the tasks have. `rows`: their numbers, by task; `least_rows`: of a block.

    Each task divides its own rows, so that the blocks depend on the tasks.
    """
    return RowDivision(list(rows), [block_count(each, least_rows) for each in rows], is_common=False)


class SumTree(Generic[Summand]):
    """Adds up consecutive nodes, which come in order. Keeps two for each level of the tree, and part of a group.

    `keep`: returns what is kept of a node until the next one comes. `add`: returns the sum of what is kept and another
    node, to the right, and may change the former.
    """

    def __init__(
        self, add: Callable[[Summand, Summand], Summand], keep: Callable[[Summand], Summand]
    ) -> None:
        self._add, self._keep = add, keep
        self._nodes: list[tuple[range, Summand]] = []

    def append(self, leaves: range, summand: Summand) -> None:
        """Add the node that follows the last one. `leaves`: those of which it is the sum."""
        nodes, is_sum = self._nodes, False
        while nodes and _are_joined(nodes[-1][0], leaves):
            left, kept = nodes.pop()
            leaves, summand, is_sum = range(left.start, leaves.stop), self._add(kept, summand), True
        nodes.append((leaves, summand if is_sum else self._keep(summand)))

    def nodes(self) -> list[tuple[range, Summand]]:
        """Return the nodes of which the leaves so far consist, in order."""
        return list(self._nodes)

    def total(self) -> Summand:
        """Return the sum of all nodes. They must begin with leaf 0."""
        *others, (_, total) = self._nodes
        for _, left in reversed(others):
            total = self._add(left, total)
        return total


def _are_joined(left: range, right: range) -> bool:
    """Return whether the sum of a node and the next one is a node."""
    if left.start % GROUP:  # a leaf whose group begins in another task
        return False
    if left.stop % GROUP:  # the beginning of a group
        return len(right) == 1
    return len(left) == len(right) and left.start % (2 * len(left)) == 0


def nodes_of(leaves: range) -> list[range]:
    """Return the nodes of which consecutive leaves consist, in order: those that `SumTree` would have."""
    first_group = min(-(-leaves.start // GROUP) * GROUP, leaves.stop)
    nodes = [range(leaf, leaf + 1) for leaf in range(leaves.start, first_group)]
    begin, end = first_group // GROUP, leaves.stop // GROUP  # of whole groups
    while begin < end:
        count = 1 << ((end - begin).bit_length() - 1)
        if begin:
            count = min(count, begin & -begin)
        nodes.append(range(begin * GROUP, (begin + count) * GROUP))
        begin += count
    last_group = max(first_group, end * GROUP)
    return [*nodes, range(last_group, leaves.stop)] if last_group < leaves.stop else nodes
