"""The hosts of ranks, and which lists of `group` contradict each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.topology import Topology, compute_topology, contradiction_of, note_of


def topologies(keys: str) -> list[Topology]:
    return [compute_topology(rank, keys, [f"host-{key}" for key in keys]) for rank in range(len(keys))]


def test_a_lone_rank() -> None:
    assert topologies("a") == [
        Topology(
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            cross_rank=0,
            cross_size=1,
            local_ranks=(0,),
            hosts=("host-a",),
            host_of=(0,),
            is_homogeneous=True,
        )
    ]


def test_two_equal_hosts() -> None:
    for rank, topology in enumerate(topologies("bbaa")):
        assert (topology.local_rank, topology.local_size) == (rank % 2, 2)
        assert (topology.cross_rank, topology.cross_size) == (rank // 2, 2)
        assert topology.local_ranks == ((0, 1), (2, 3))[rank // 2]
        assert topology.host_of == (0, 0, 1, 1)
        assert topology.hosts == ("host-b", "host-b", "host-a", "host-a")
        assert topology.leader == (0, 2)[rank // 2]
        assert topology.is_homogeneous


def test_interleaved_hosts_of_different_sizes() -> None:
    """Host a has ranks 0, 2, 4; host b 1; host c 3, 5."""
    all_ranks = topologies("abacac")
    assert [t.local_rank for t in all_ranks] == [0, 0, 1, 0, 2, 1]
    assert [t.local_size for t in all_ranks] == [3, 1, 3, 2, 3, 2]
    assert [t.cross_rank for t in all_ranks] == [0, 1, 0, 2, 0, 1]
    assert [t.cross_size for t in all_ranks] == [3, 3, 2, 3, 1, 2]
    assert [t.is_homogeneous for t in all_ranks] == [False] * 6
    assert [all_ranks[0].is_local(rank) for rank in range(6)] == [True, False, True, False, True, False]


@given(st.text("abcde", min_size=1, max_size=40))
def test_all_ranks_see_one_world(keys: str) -> None:
    all_ranks = topologies(keys)
    assert len({(t.size, t.hosts, t.host_of, t.is_homogeneous) for t in all_ranks}) == 1
    assert all_ranks[0].host_of[0] == 0
    # local and cross ranks together tell ranks apart, and each counts from 0 without a gap
    assert len({(t.local_rank, t.cross_rank) for t in all_ranks}) == len(keys)
    for rank, t in enumerate(all_ranks):
        assert t.local_ranks[t.local_rank] == rank
        assert list(t.local_ranks) == [other for other, key in enumerate(keys) if key == keys[rank]]
        assert t.local_size == len(t.local_ranks)
        across = [other for other in all_ranks if other.local_rank == t.local_rank]
        assert t.cross_size == len(across)
        assert sorted(other.cross_rank for other in across) == list(range(len(across)))
    assert all_ranks[0].is_homogeneous == (len({t.local_size for t in all_ranks}) == 1)


def found(lists: list[list[int]], is_disjoint: bool) -> tuple[str | None, list[int]]:
    """Return the error, and the ranks whose lists it needs."""
    asked: list[int] = []

    def list_of(rank: int) -> list[int]:
        asked.append(rank)
        return lists[rank]

    return contradiction_of([note_of(listed, is_disjoint) for listed in lists], list_of), asked


@pytest.mark.parametrize("seed", range(50))
def test_only_lists_that_all_members_pass_make_disjoint_groups(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.sample(range(20), 20)
    cuts = sorted(draw.sample(range(1, 20), 4))
    groups = [ranks[begin:end] for begin, end in zip([0, *cuts], cuts)]  # the others are in none
    lists: list[list[int]] = [next((group for group in groups if rank in group), []) for rank in range(20)]
    assert found(lists, True) == (None, [])
    wrong = draw.choice([rank for group in groups if len(group) > 1 for rank in group] or [ranks[-1]])
    others = [rank for rank in lists[wrong] if rank != wrong]
    lists[wrong] = draw.choice([[], [wrong], [wrong, *others][::-1], [wrong, *others, ranks[-1]]])
    error, asked = found(lists, True)
    if lists[wrong] != next((group for group in groups if wrong in group), [wrong]):
        assert error is not None
        assert len(asked) == 2
        assert wrong in asked
        assert all(f"rank {rank} called group({lists[rank]}, disjoint=True)" in error for rank in asked)


def test_a_long_list_is_cut() -> None:
    error, asked = found([list(range(1000)), list(range(1000)), list(range(999))], False)
    assert asked == [0, 2]
    assert error is not None
    assert "rank 0 called group([0, 1, 2, " in error
    assert "30, 31, ... 1000 in all]), but rank 2 called group([0, 1, " in error
    assert len(error) < 700
