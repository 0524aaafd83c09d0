"""Which lists of `group` contradict each other, and what the error names."""

from __future__ import annotations

import random

import pytest

from ronde.comm.group_lists import contradiction_of, note_of


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
