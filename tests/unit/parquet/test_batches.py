"""Which rows each rank reads: equally many, all of them, in an order that follows from the seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ronde.data.columns import Columns
from ronde.data.parquet_files import RowGroup, RowSpan, spans_of
from ronde.parquet.batches import batches, disjoint_range, equal_range, shuffle_groups

groups = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(
    lambda sizes: [RowGroup(f"{place}.parquet", 0, rows) for place, rows in enumerate(sizes)]
)


def rows_of(group: RowGroup) -> list[int]:
    first = int(group.file.partition(".")[0]) * 100
    return list(range(first, first + group.rows))


def read(span: RowSpan) -> Columns:
    return {"x": np.array(rows_of(span.group)[span.first : span.end])}


def epoch_of(
    rank: int, size: int, groups: list[RowGroup], seed: int, epoch: int, batch: int
) -> list[list[int]]:
    shuffled = shuffle_groups(groups, seed, epoch)
    spans = spans_of(shuffled, equal_range(sum(group.rows for group in groups), rank, size))
    order = np.random.default_rng([seed, epoch, rank])
    return [columns["x"].tolist() for columns in batches(spans, read, batch, 30, order)]


@given(groups, st.integers(1, 9), st.integers(0, 5), st.integers(1, 50))
def test_ranks_take_equally_many_steps_and_together_read_every_row(
    groups: list[RowGroup], size: int, seed: int, batch: int
) -> None:
    ranks = [epoch_of(rank, size, groups, seed, 3, batch) for rank in range(size)]
    assert len({tuple(len(each) for each in steps) for steps in ranks}) == 1, "the same batches on every rank"
    assert all(len(each) == batch for each in ranks[0][:-1])
    everything = {row for group in groups for row in rows_of(group)}
    assert {row for steps in ranks for each in steps for row in each} == everything
    for rank, steps in enumerate(ranks):
        assert max(Counter(row for each in steps for row in each).values()) == 1, "no rank reads a row twice"
        assert steps == epoch_of(rank, size, groups, seed, 3, batch), "reproducible"


@given(groups, st.integers(1, 9))
def test_in_validation_each_row_is_read_once_and_in_order(groups: list[RowGroup], size: int) -> None:
    total = sum(group.rows for group in groups)
    found = []
    for rank in range(size):
        spans = spans_of(groups, disjoint_range(total, rank, size))
        found += [row for columns in batches(spans, read, 7) for row in columns["x"].tolist()]
    assert found == [row for group in groups for row in rows_of(group)]


def test_epochs_and_seeds_differ_in_their_order() -> None:
    groups = [RowGroup(f"{place}.parquet", 0, 20) for place in range(10)]
    orders = [epoch_of(0, 2, groups, seed, epoch, 10) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert orders[0][0] != sorted(orders[0][0]), "rows are shuffled within the buffer"
