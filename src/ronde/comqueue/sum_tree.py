"""A sum with one order of additions, whichever tasks have the summands. Pure.

The summands are leaves, numbered from 0, in groups of eight. The leaves of a group are added in order. The sums of the
groups are added along a binary tree: pairs of groups, pairs of these pairs, and so on. A task adds up its consecutive
leaves to *nodes*: to the sums that occur on the way. The nodes of all tasks, in order, add up to the same bits as the
leaves of one task.

Adding in order takes one accumulator, which stays in the processor's cache. A tree down to the leaves would take twice
as long for large summands, because it copies every second one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["GROUP", "SumTree", "nodes_of"]

GROUP = 8  # leaves

Summand = TypeVar("Summand")


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
