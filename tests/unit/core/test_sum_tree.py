from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ronde.core.splits import even_split
from ronde.core.sum_tree import SumTree, nodes_of


def joined(left: str, right: str, level: int) -> str:
    assert level == left.count(",").bit_length() - 1
    assert left.count(",") >= right.count(",")
    return f"({left}{right})"


def recursive(begin: int, end: int) -> str:
    """Return the tree over leaves by its definition."""
    if end - begin == 1:
        return f"{begin},"
    half = 1 << ((end - begin - 1).bit_length() - 1)
    return f"({recursive(begin, begin + half)}{recursive(begin + half, end)})"


def tree_of(leaves: range) -> SumTree[str]:
    tree = SumTree(joined, str)
    for leaf in leaves:
        tree.append(0, leaf, f"{leaf},")
    return tree


@given(st.integers(1, 200), st.integers(1, 9))
def test_any_number_of_tasks_makes_the_same_additions(leaves: int, num_tasks: int) -> None:
    whole, begin = SumTree(joined, str), 0
    for count in even_split(leaves, num_tasks):
        for (level, number), partial in tree_of(range(begin, begin + count)).nodes():
            whole.append(level, number, partial)
        begin += count
    assert whole.total() == recursive(0, leaves)


@given(st.integers(0, 5000), st.integers(0, 200))
def test_the_nodes_of_consecutive_leaves(begin: int, count: int) -> None:
    leaves = range(begin, begin + count)
    nodes = nodes_of(leaves)
    assert nodes == [node for node, _ in tree_of(leaves).nodes()]
    assert [
        leaf for level, number in nodes for leaf in range(number << level, (number + 1) << level)
    ] == list(leaves)
    assert len(nodes) <= 2 * max(1, count.bit_length())


def test_a_power_of_two_of_tasks_has_one_node_each() -> None:
    assert [nodes_of(range(begin, begin + 16)) for begin in (0, 16, 32, 48)] == [[(4, n)] for n in range(4)]
