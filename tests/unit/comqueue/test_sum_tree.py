from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.splits import even_split
from ronde.comqueue.sum_tree import GROUP, SumTree, nodes_of


def joined(left: str, right: str) -> str:
    return f"({left}{right})"


def in_order(leaves: range) -> str:
    """Return the sum of a group by its definition."""
    total = f"{leaves[0]},"
    for leaf in leaves[1:]:
        total = joined(total, f"{leaf},")
    return total


def recursive(begin: int, end: int) -> str:
    """Return the tree over groups by its definition. `begin`, `end`: leaves."""
    groups = -(-(end - begin) // GROUP)
    if groups == 1:
        return in_order(range(begin, end))
    half = begin + GROUP * (1 << ((groups - 1).bit_length() - 1))
    return joined(recursive(begin, half), recursive(half, end))


def tree_of(leaves: range) -> SumTree[str]:
    tree = SumTree(joined, str)
    for leaf in leaves:
        tree.append(range(leaf, leaf + 1), f"{leaf},")
    return tree


@given(st.integers(1, 200), st.integers(1, 9))
def test_any_number_of_tasks_makes_the_same_additions(leaves: int, num_tasks: int) -> None:
    whole, begin = SumTree(joined, str), 0
    for count in even_split(leaves, num_tasks):
        for node, partial in tree_of(range(begin, begin + count)).nodes():
            whole.append(node, partial)
        begin += count
    assert whole.total() == recursive(0, leaves)


@given(st.integers(0, 5000), st.integers(0, 200))
def test_the_nodes_of_consecutive_leaves(begin: int, count: int) -> None:
    leaves = range(begin, begin + count)
    nodes = nodes_of(leaves)
    assert nodes == [node for node, _ in tree_of(leaves).nodes()]
    assert [leaf for node in nodes for leaf in node] == list(leaves)
    assert len(nodes) <= GROUP + 2 * max(1, count.bit_length())


def test_a_power_of_two_of_tasks_has_one_node_each() -> None:
    tasks = [range(begin, begin + 16) for begin in (0, 16, 32, 48)]
    assert [nodes_of(leaves) for leaves in tasks] == [[leaves] for leaves in tasks]
