from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.rank_set import RankSet

RANKS = st.sets(st.integers(0, 40))


def test_neighbours_become_one_range() -> None:
    assert RankSet.of([4, 1, 2, 0, 7]).ranges == ((0, 2), (4, 4), (7, 7))
    assert RankSet.up_to(10_000).ranges == ((0, 9999),)
    assert RankSet.up_to(0) == RankSet()


def test_a_rank_that_comes_twice_is_named() -> None:
    with pytest.raises(ValueError, match="rank 5 comes twice"):
        RankSet.union([RankSet.of([3, 4, 5]), RankSet.of([5, 6])])
    with pytest.raises(ValueError, match="rank 2 comes twice"):
        RankSet.of([2, 1, 2])


@given(RANKS)
def test_is_what_a_set_is(ranks: set[int]) -> None:
    one = RankSet.of(ranks)
    assert list(one) == sorted(ranks)
    assert len(one) == len(ranks)
    assert [rank for rank in range(42) if rank in one] == sorted(ranks)
    assert not ranks or one.first == min(ranks)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_union_of_parts(part_of: list[int]) -> None:
    parts = [RankSet.of(rank for rank, each in enumerate(part_of) if each == part) for part in range(4)]
    assert RankSet.union(parts) == RankSet.up_to(len(part_of))
    assert RankSet.union(reversed(parts)) == RankSet.up_to(len(part_of))


@given(RANKS, RANKS)
def test_within_is_the_relation_of_subsets(some: set[int], others: set[int]) -> None:
    assert RankSet.of(some).within(RankSet.of(others)) == (some <= others)
