"""Which slots get which partitions of a data frame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ronde.launch.clusters.partition_places import deal_partitions


def test_slots_get_what_their_workers_hold() -> None:
    assert deal_partitions([["b"], ["a"], ["b"], ["a"]], ["a", "b"]) == [[1, 3], [0, 2]]
    assert deal_partitions([["a"], ["a"], ["b"]], ["a", "a", "b"]) == [[0], [1], [2]]


def test_partitions_move_where_they_would_be_too_many() -> None:
    assert deal_partitions([["a"], ["a"], ["a"], ["a"], ["a"]], ["a", "b"]) == [[0, 1, 2], [3, 4]]
    assert deal_partitions([["gone"], []], ["a", ""]) == [[0], [1]]
    assert deal_partitions([["b"]], ["a", "b", "c"]) == [[0], [], []]


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=20), st.lists(st.sampled_from("abcd"), min_size=1))
def test_each_partition_has_one_slot_and_shares_differ_by_one(
    holders: list[set[str]], places: list[str]
) -> None:
    dealt = deal_partitions(holders, places)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(holders)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
