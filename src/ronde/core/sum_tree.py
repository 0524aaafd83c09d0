"""A sum with one order of additions, whichever tasks have the summands.

The summands are the leaves, numbered from 0, of a binary tree: node n of level l is the sum of the leaves from n * 2**l
to (n + 1) * 2**l, without those that do not exist. A task adds up its consecutive leaves as far as they form whole
nodes, at most two for each level. The nodes of all tasks, in order, add up to the same bits as the leaves of one task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Node", "SumTree", "nodes_of"]

Summand = TypeVar("Summand")
Node = tuple[int, int]  # level, number


class SumTree(Generic[Summand]):
    """Adds up consecutive nodes, which come in order; it keeps no more than two for each level.

    `keep`: returns what is kept of a node until its sibling comes. `add`: returns the sum of what is kept and another
    node, to the right, and may change the former. Its third argument is the level of the former.
    """

    def __init__(
        self, add: Callable[[Summand, Summand, int], Summand], keep: Callable[[Summand], Summand]
    ) -> None:
        self._add, self._keep = add, keep
        self._nodes: list[tuple[int, int, Summand]] = []  # level, number, sum

    def append(self, level: int, number: int, summand: Summand) -> None:
        """Add the node that follows the last one."""
        nodes = self._nodes
        is_sum = False
        while number & 1 and nodes and nodes[-1][0] == level:
            summand, is_sum = self._add(nodes.pop()[2], summand, level), True
            level, number = level + 1, number >> 1
        nodes.append((level, number, summand if is_sum else self._keep(summand)))

    def nodes(self) -> list[tuple[Node, Summand]]:
        """Return the nodes of which the leaves so far consist, in order."""
        return [((level, number), summand) for level, number, summand in self._nodes]

    def total(self) -> Summand:
        """Return the sum of all nodes. They must begin with leaf 0."""
        *others, (_, _, total) = self._nodes
        for level, _, left in reversed(others):
            total = self._add(left, total, level)
        return total


def nodes_of(leaves: range) -> list[Node]:
    """Return the nodes of which consecutive leaves consist, in order: those that `SumTree` would have."""
    nodes, begin = [], leaves.start
    while begin < leaves.stop:
        level = (leaves.stop - begin).bit_length() - 1
        if begin:
            level = min(level, (begin & -begin).bit_length() - 1)  # of those that begin here
        nodes.append((level, begin >> level))
        begin += 1 << level
    return nodes
