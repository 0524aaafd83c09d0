"""A sum with one order of additions, whichever tasks have the summands.

The summands are the leaves, numbered from 0, of a binary tree: node n of level l is the sum of the leaves from n * 2**l
to (n + 1) * 2**l, without those that do not exist. A task adds up its consecutive leaves as far as they form whole
nodes, at most two for each level. The nodes of all tasks, in order, add up to the same bits as the leaves of one task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Node", "SumTree", "nodes_of"]

Summand = TypeVar("Summand")
Node = tuple[int, int]  # level, number


class SumTree(Generic[Summand]):
    """Adds up consecutive nodes, which come in order; it keeps no more than two for each level.

    `add`: returns the sum of two summands, the left one and the right one. The third argument is whether the left one
    is a sum that `add` has returned, and may be overwritten.
    """

    def __init__(self, add: Callable[[Summand, Summand, bool], Summand]) -> None:
        self._add = add
        self._nodes: list[tuple[int, int, Summand, bool]] = []  # level, number, sum, made here

    def append(self, level: int, number: int, summand: Summand) -> None:
        """Add the node that follows the last one."""
        is_made = False
        nodes = self._nodes
        while number & 1 and nodes and nodes[-1][:2] == (level, number - 1):
            _, _, left, is_left_made = nodes.pop()
            summand, is_made = self._add(left, summand, is_left_made), True
            level, number = level + 1, number >> 1
        nodes.append((level, number, summand, is_made))

    def nodes(self) -> Iterator[tuple[Node, Summand]]:
        """Yield the nodes of which the leaves so far consist, in order."""
        for level, number, summand, _ in self._nodes:
            yield (level, number), summand

    def total(self) -> Summand:
        """Return the sum of all nodes. They must begin with leaf 0."""
        *others, (_, _, total, _) = self._nodes
        for _, _, left, is_made in reversed(others):
            total = self._add(left, total, is_made)
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
