"""Runs the simulated partitions, and makes sure that two worlds of one job would be noticed."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.sim.rendezvous import draw_nodes, main, simulate
from tests.sim.rendezvous_partition import Partition

from ronde.rendezvous import quorum
from ronde.rendezvous.quorum import count_missing

WHAT_HAPPENS = {"partitions", "moves", "called", "gave up", "nodes: succeeded"}


def test_some_seeds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(25):
        counts += simulate(seed, 3 + seed % 4, Partition)
    assert set(counts) >= WHAT_HAPPENS, "the simulations have become dull"


@pytest.mark.slow
def test_60_more_seeds() -> None:
    for seed in range(10_000, 10_060):
        simulate(seed, draw_nodes(seed), Partition)


@pytest.mark.parametrize(
    ("living", "here", "missing_at_home", "missing_elsewhere"),
    [(0, 0, 0, 0), (1, 1, 0, 0), (2, 1, 0, 1), (3, 1, 1, 1), (3, 2, 0, 0), (4, 2, 0, 1), (5, 2, 1, 1)],
)
def test_at_most_one_side_has_enough(
    living: int, here: int, missing_at_home: int, missing_elsewhere: int
) -> None:
    last, ended = [f"n{index}" for index in range(living + 1)], {f"n{living}"}
    assert count_missing(last, ended, last[:here], False) == missing_at_home
    assert count_missing(last, ended, last[:here], True) == missing_elsewhere


def test_two_worlds_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum, "count_missing", lambda *_: 0)
    assert main(["--seeds", "400"], Partition) == 1
