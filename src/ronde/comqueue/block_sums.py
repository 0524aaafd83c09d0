"""Sums over the row blocks of all tasks, in the fixed order of `core/sum_tree`.

A summand is a tree of arrays, which travels as its leaves. Each task adds up the summands of its blocks, and the tasks
exchange their partial sums, of which they have a few each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue.array_tree import describe_tree, leaves_of, map_leaves
from ronde.comqueue.task_group import TaskGroup
from ronde.core.row_blocks import RowDivision
from ronde.core.sum_tree import SumTree, nodes_of
from ronde.errors import UsageError

__all__ = ["sum_over_blocks"]

Leaf = NDArray[Any]


def sum_over_blocks(summands: Iterable[Any], division: RowDivision, group: TaskGroup, what: str) -> Any:
    """Return the sum of the summands of all blocks. All tasks call it.

    `summands`: those of this task, by block. `what`: gives them, for errors.
    """
    tree: SumTree[Any] = SumTree(lambda left, right, is_made: add_trees(left, right, what))
    for block, summand in zip(division.blocks_of(group.task_id), summands, strict=True):
        tree.append(0, block, summand)
    everyone = group.allgather_object([partial for _, partial in tree.nodes()])
    whole: SumTree[Any] = SumTree(lambda left, right, is_made: add_trees(left, right, what))
    for task, partials in enumerate(everyone):
        for (level, number), partial in zip(nodes_of(division.blocks_of(task)), partials, strict=True):
            whole.append(level, number, partial)
    return whole.total()


def add_trees(left: Any, right: Any, what: str) -> Any:
    rights = iter(leaves_of(right, what))
    if describe_tree(left) != describe_tree(right):
        raise UsageError(
            f"{what} gives {describe_tree(left)} for one block and {describe_tree(right)} for another: expected one "
            "structure, dtype and shape for all blocks"
        )
    return map_leaves(left, lambda leaf: np.asarray(np.add(leaf, next(rights))))
