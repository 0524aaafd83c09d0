"""Shards that survive their ranks: real processes that are killed before and in a commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ranks.elastic.neighbour_programs import survive

from ronde.testing import ranks


def committed(rank: int) -> list[float]:
    values = np.arange(1000.0) + 1000 * rank
    values[1:4] = -1, -2, -3
    return values.tolist()


def outcomes(started: int, lost: tuple[int, ...], *args: Any) -> list[Any]:
    with ranks.start(survive, started, *args) as job:
        found = job.outcomes()
    assert [each.rank for each in found if each.error is not None] == list(lost)
    return [each.value for each in found]


@pytest.mark.parametrize("phase", ["before the commit", "in the commit"])
def test_a_spare_gets_the_shard_of_a_lost_rank(phase: str) -> None:
    """The survivors have other ranks in the new world."""
    found = outcomes(4, (1,), 3, (1,), (3, 2, 0), phase, False)
    for new_rank, started in enumerate((3, 2, 0)):
        assert found[started] == (committed(new_rank), [(new_rank - 1) % 3])


def test_a_rank_and_its_holder_are_an_error_that_names_the_shard() -> None:
    found = outcomes(5, (1, 2), 3, (1, 2), (0, 3, 4), "before the commit", False)
    expected = (
        "at commit 3 no process has the shards of these ranks: 1; each was lost together with the rank that kept the "
        "copy of its shard"
    )
    assert [found[started] for started in (0, 3, 4)] == [expected] * 3


@pytest.mark.slow
def test_a_smaller_world_reshards_or_says_what_to_do() -> None:
    found = outcomes(4, (2,), 4, (2,), (0, 1, 3), "before the commit", True)
    values = np.concatenate([committed(rank) for rank in range(4)])
    for new_rank, started in enumerate((0, 1, 3)):
        expected = np.array_split(values, 3)[new_rank].tolist()
        assert found[started] == (expected, [(new_rank - 1) % 3])
    found = outcomes(4, (2,), 4, (2,), (0, 1, 3), "before the commit", False)
    assert found[0] == (
        "the state has the shards of 4 ranks, and the world has 3 now: let the job wait for replacements (--min-np 4), "
        "or give the part 'shard' a method load_shards(payloads), which takes all shards"
    )
