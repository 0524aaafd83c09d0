from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comqueue.row_blocks import block_count, divide_partitions, divide_rows

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
