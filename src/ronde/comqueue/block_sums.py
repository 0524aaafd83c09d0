"""Sums over the row blocks of all tasks, in the fixed order of `comqueue/row_blocks`.

A summand is a tree of arrays. Each task adds up the summands of its blocks to a few partial sums, the nodes of the sum
tree that lie in its blocks. All tasks know which nodes each of them has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.comm.splits import even_split
from ronde.comqueue.agreement import require_same_structure
from ronde.comqueue.array_tree import describe_tree, flatten, layout_of, map_leaves
from ronde.comqueue.functions import ComContext, CommunicateFunction, name_of
from ronde.comqueue.partitions import TaskRows
from ronde.comqueue.row_blocks import GROUP, RowDivision, SumTree, nodes_of
from ronde.comqueue.task_group import TaskGroup
from ronde.data.rows import Buffers
from ronde.errors import UsageError
from ronde.types import Sum

__all__ = ["SumBlocks", "sum_over_blocks"]


Array = NDArray[Any]

MOST_COLLECTED = 1 << 17  # bytes of the summands of a task, to be added up together
FEW = 1024  # elements, for which a single call of NumPy takes less time than one for each summand
MOST_GATHERED = 1 << 18  # bytes of the partial sums of all tasks, to be added up by every task


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


def sum_over_blocks(
    summands: Iterator[Any], division: RowDivision, group: TaskGroup, buffers: Buffers, source: str
) -> Any:
    """Return the sum of the summands of all blocks, a new tree. All tasks call it.

    `summands`: those of this task, by block; a summand may be changed when the next one is asked for. `source`: what
    gives them, for errors.
    """
    if list(division.blocks) == [1]:
        return _copied(next(summands), source)
    blocks = division.blocks_of(group.task_id)
    mine = _Summands(summands, source)
    partials = mine.add_up(blocks, buffers) if blocks else []
    if 0 in division.blocks:  # tasks without blocks learn from another what a summand looks like
        busy = next(task for task, count in enumerate(division.blocks) if count)
        example = group.broadcast_object(mine.example, busy)
        if not blocks:
            mine.take_example(example)
    if group.num_tasks > 1:
        require_same_structure(group, mine.structure, lambda: describe_tree(mine.example), f"{source} gives")
    nodes = _nodes_by_task(tuple(division.blocks))
    flats = [
        _total([partial[number] for partial in partials], size, dtype, nodes, group)
        for number, (dtype, size) in enumerate(zip(mine.layout.dtypes, mine.layout.sizes))
    ]
    totals = mine.layout.parts(flats)
    return map_leaves(mine.example, lambda leaf: next(totals))


def _copied(tree: Any, source: str) -> Any:
    """Return a copy of the only summand."""
    try:
        return map_leaves(tree, lambda leaf: leaf.copy())
    except Exception:
        flatten(tree, source)  # raises UsageError if it is no tree of arrays
        raise


@functools.lru_cache(maxsize=100)
def _nodes_by_task(blocks: tuple[int, ...]) -> list[list[range]]:
    ends = np.cumsum(blocks).tolist()
    return [nodes_of(range(end - count, end)) for end, count in zip(ends, blocks)]


class _Summands:
    """The summands of the blocks of one task, and their sums as flat arrays, one for each dtype.

    Attributes:
        example: A summand.
        structure: That of all summands.
        layout: That of the flat arrays.
    """

    def __init__(self, summands: Iterator[Any], source: str) -> None:
        self._summands, self._source = summands, source
        self.example: Any = None

    def take_example(self, summand: Any) -> list[Array]:
        """Expect summands of this structure. Return the leaves."""
        leaves, self.structure = flatten(summand, self._source)
        self.layout = layout_of(leaves)
        self.example = summand
        return leaves

    def add_up(self, blocks: range, buffers: Buffers) -> list[list[Array]]:
        """Return the partial sums of some blocks, at least one."""
        first = [self.take_example(next(self._summands))]
        if sum(leaf.nbytes for leaf in first[0]) * len(blocks) <= MOST_COLLECTED:
            return self._add_up_levels(first.pop(), blocks)
        self.example = map_leaves(self.example, _without_memory)
        return self._add_up_blocks(first, blocks, buffers)

    def _leaves(self, summand: Any) -> list[Array]:
        """Return the leaves of a summand. Raises UsageError if it has another structure than the first one."""
        leaves, structure = flatten(summand, self._source)
        if structure != self.structure:
            raise UsageError(
                f"{self._source} gives {describe_tree(self.example)} for one block and {describe_tree(summand)} for "
                "another: expected one structure, dtype and shape for all blocks"
            )
        return leaves

    def _add_up_levels(self, first: list[Array], blocks: range) -> list[list[Array]]:
        """Add up all groups at once: little work in Python, but all summands are kept."""
        flats = [
            np.empty((len(blocks), size), dtype) for dtype, size in zip(self.layout.dtypes, self.layout.sizes)
        ]
        parts = list(self.layout.parts(flats))
        for part, leaf in zip(parts, first):
            part[0] = leaf
        for number, summand in enumerate(self._summands, 1):
            if type(summand) is np.ndarray and (summand.dtype, summand.shape) == self.structure:  # most often
                parts[0][number] = summand
                continue
            for part, leaf in zip(parts, self._leaves(summand)):
                part[number] = leaf
        return [
            [_sum_of_rows(flat[leaves.start - blocks.start : leaves.stop - blocks.start]) for flat in flats]
            for leaves in nodes_of(blocks)
        ]

    def _add_up_blocks(self, first: list[list[Array]], blocks: range, buffers: Buffers) -> list[list[Array]]:
        """Add up one block after the other, and keep few sums.

        No summand is kept, so that the next one finds the memory of the last one. `first`: has the leaves of the first.
        """

        def keep(summand: _Sum) -> _Sum:
            kinds = zip(self.layout.sizes, self.layout.dtypes)
            flats = [buffers.empty(size, dtype) for size, dtype in kinds]
            self.layout.pack(summand.leaves, flats)
            return _Sum(list(self.layout.parts(flats)), flats)

        tree = SumTree(_Sum.add, keep)
        for block in blocks:
            tree.append(
                range(block, block + 1), _Sum(first.pop() if first else self._leaves(next(self._summands)))
            )
        return [list(kept.flats) for _, kept in tree.nodes()]


class _Sum(NamedTuple):
    """A summand, or a sum of several. `leaves`: arrays; of a sum, they are parts of `flats`."""

    leaves: Sequence[Array]
    flats: Sequence[Array] = ()

    def add(self, other: _Sum) -> _Sum:
        """Add another one in place."""
        for mine, leaf in zip(self.leaves, other.leaves):
            np.add(mine, leaf, out=mine)
        return self


def _without_memory(leaf: Array) -> Array:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _sum_of_rows(rows: Array) -> Array:
    """Return the sum of the leaves of a node: in order in a group, otherwise along the tree."""
    if len(rows) <= GROUP:
        return _sum_in_order(rows)
    rows = _sum_in_order(rows.reshape(-1, GROUP, rows.shape[1]).swapaxes(0, 1))
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    total: Array = rows[0]
    return total


def _sum_in_order(summands: Array) -> Array:
    """Return the sum along the first axis, a new array. (NumPy's own sum has no fixed order.)"""
    if summands.size <= FEW:
        last: Array = np.add.accumulate(summands, axis=0, dtype=summands.dtype)[-1]
        return last
    total: Array = summands[0].copy()
    for summand in summands[1:]:
        total += summand
    return total


def _total(
    partials: Sequence[Array],
    size: int,
    dtype: np.dtype[Any],
    nodes: Sequence[Sequence[range]],
    group: TaskGroup,
) -> Array:
    """Return the sum of the partial sums of all tasks. `nodes`: which partial sums each task has."""
    counts = [len(each) for each in nodes]
    if counts == [1]:
        return partials[0]
    if sum(counts) == 1:  # one task has all rows
        return group.allgather(partials[0] if partials else np.empty(0, dtype))
    if counts == [1, 1]:  # the order of tasks is that of the tree
        group.allreduce(partials[0], Sum)
        return partials[0]
    all_nodes = [node for each in nodes for node in each]
    if sum(counts) * size * dtype.itemsize <= MOST_GATHERED:
        return _sum_of_nodes(_gathered(partials, size, dtype, counts, group), all_nodes)
    shares = even_split(size, group.num_tasks)
    ends = np.cumsum(shares)
    pieces = [partial[end - share : end] for end, share in zip(ends, shares) for partial in partials]
    sent = np.concatenate([np.empty(0, dtype), *pieces])  # also of a task without blocks
    mine = group.alltoall(sent, [share * len(partials) for share in shares])
    return group.allgather(_sum_of_nodes(mine.reshape(sum(counts), -1), all_nodes))


def _gathered(
    partials: Sequence[Array], size: int, dtype: np.dtype[Any], counts: Sequence[int], group: TaskGroup
) -> Array:
    """Return the partial sums of all tasks, one in each row.

    Each task fills its rows, and the bytes of all tasks are added: an all-reduce takes less time than an all-gather.
    """
    rows = np.zeros((sum(counts), size), dtype)
    for row, partial in enumerate(partials, sum(counts[: group.task_id])):
        rows[row] = partial
    if group.num_tasks > 1 and size:
        group.allreduce(rows.view(np.uint8), Sum)
    return rows


def _sum_of_nodes(rows: Array, nodes: Sequence[range]) -> Array:
    """Return the sum of the nodes of all tasks. Changes the rows."""
    tree: SumTree[Array] = SumTree(lambda left, right: np.add(left, right, out=left), lambda row: row)
    for leaves, row in zip(nodes, rows, strict=True):
        tree.append(leaves, row)
    return tree.total()
