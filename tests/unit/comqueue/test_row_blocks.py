from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.splits import even_split
from ronde.comqueue.row_blocks import (
    GROUP,
    SumTree,
    block_count,
    divide_partitions,
    divide_rows,
    nodes_of,
)

NUM_ROWS = st.integers(1, 300) | st.integers(1, 10**7)
LEAST_ROWS = st.integers(1, 2000)
NUM_TASKS = st.integers(1, 9) | st.integers(60, 70)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, 1),
        (5, 5),
        (63, 63),
        (64, 64),
        (65, 64),
        (64 * 8192, 64),
        (64 * 8192 + 1, 128),
        (10**6, 128),
        (0, 0),
    ],
)
def test_the_number_of_blocks(num_rows: int, expected: int) -> None:
    assert block_count(num_rows) == expected


@pytest.mark.parametrize(
    ("num_rows", "least_rows", "expected"),
    [
        (150, 1024, 1),
        (150, 64, 2),
        (64 * 100 - 1, 100, 63),
        (64 * 100, 100, 64),
        (10**7, 1024, 2048),
        (0, 9, 0),
    ],
)
def test_few_rows_make_few_blocks_on_demand(num_rows: int, least_rows: int, expected: int) -> None:
    assert block_count(num_rows, least_rows) == expected


@given(NUM_ROWS, NUM_TASKS, LEAST_ROWS)
def test_blocks_have_the_least_number_of_rows(num_rows: int, num_tasks: int, least_rows: int) -> None:
    division = divide_rows(num_rows, num_tasks, least_rows)
    sizes = [len(rows) for task in range(num_tasks) for rows in division.rows_of_blocks(task)]
    assert sizes == [len(rows) for rows in divide_rows(num_rows, 1, least_rows).rows_of_blocks(0)]
    assert sum(sizes) == num_rows
    assert min(sizes) >= min(least_rows, num_rows)
    assert max(sizes) <= 8192


@given(NUM_ROWS, NUM_TASKS)
def test_the_blocks_do_not_depend_on_the_tasks(num_rows: int, num_tasks: int) -> None:
    division = divide_rows(num_rows, num_tasks)
    sizes = [len(rows) for task in range(num_tasks) for rows in division.rows_of_blocks(task)]
    assert sizes == [len(rows) for rows in divide_rows(num_rows, 1).rows_of_blocks(0)]
    assert len(sizes) == block_count(num_rows)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
    assert max(sizes) <= 8192


@given(NUM_ROWS, NUM_TASKS)
def test_each_task_has_consecutive_rows_in_whole_blocks(num_rows: int, num_tasks: int) -> None:
    division = divide_rows(num_rows, num_tasks)
    assert division.num_rows == num_rows
    assert max(division.blocks) - min(division.blocks) <= 1
    if num_rows >= 64 and num_tasks in (1, 2, 4, 8, 64):
        assert max(division.rows) - min(division.rows) <= 1
    row_end = block_end = 0
    for task in range(num_tasks):
        rows, blocks = division.rows_of(task), division.blocks_of(task)
        assert (rows.start, blocks.start) == (row_end, block_end)
        row_end, block_end = rows.stop, blocks.stop
        mine = division.rows_of_blocks(task)
        assert len(mine) == len(blocks)
        assert [row for block in mine[:9] for row in block] == list(range(sum(map(len, mine[:9]))))
        assert sum(map(len, mine)) == len(rows)
    assert (row_end, block_end) == (num_rows, block_count(num_rows))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any))
def test_partitions_are_divided_each(rows: list[int]) -> None:
    division = divide_partitions(rows)
    assert list(division.rows) == rows
    for task, count in enumerate(rows):
        assert division.rows_of_blocks(task) == divide_rows(max(count, 1), 1).rows_of_blocks(0)[: count or 0]


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
