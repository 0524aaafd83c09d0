"""Samples in worlds that change, simulated; and mistakes, which the simulation notices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sim.common_order import Broken
from tests.sim.elastic_samples import simulate

from ronde.elastic import batches
from ronde.elastic.batches import Position, Positions

SEEDS = 60


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulate(seed, 2 + seed % 7)
    return counts


def test_steps_that_count_see_the_batches_of_an_undisturbed_run() -> None:
    assert run(range(SEEDS))["recoveries"] > SEEDS / 2


@pytest.mark.slow
def test_300_ranks() -> None:
    simulate(1, 300)


def drop_what_does_not_divide(patch: pytest.MonkeyPatch) -> None:
    def broken(count: int, rank: int, size: int) -> slice:
        return slice(rank * (count // size), (rank + 1) * (count // size))

    patch.setattr(batches, "share_of", broken)


def deal_one_sample_twice(patch: pytest.MonkeyPatch) -> None:
    share = batches.share_of

    def broken(count: int, rank: int, size: int) -> slice:
        right = share(count, rank, size)
        return slice(max(right.start - 1, 0), right.stop)

    patch.setattr(batches, "share_of", broken)


def order_by_the_size_of_the_world(patch: pytest.MonkeyPatch) -> None:
    order = batches.order_of_epoch

    def broken(count: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
        return np.roll(order(count, seed, epoch), vars(batches)["comm"].size())

    patch.setattr(batches, "order_of_epoch", broken)


def keep_the_position_of_a_step_that_was_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "restore", lambda self: None)


def give_new_ranks_the_live_position(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "payload", lambda self: {name: tuple(each) for name, each in self.live.items()})
    patch.setattr(Positions, "restore", lambda self: None)


def begin_the_epoch_again(patch: pytest.MonkeyPatch) -> None:
    load = Positions.load

    def broken(self: Positions, payload: Any) -> None:
        load(self, {name: Position(position[0], 0) for name, position in payload.items()})

    patch.setattr(Positions, "load", broken)


def leave_the_rest_of_the_epoch_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batches, "steps_per_epoch", lambda count, global_batch: count // global_batch)


@pytest.mark.parametrize(
    "plant",
    [
        drop_what_does_not_divide,
        deal_one_sample_twice,
        order_by_the_size_of_the_world,
        keep_the_position_of_a_step_that_was_lost,
        give_new_ranks_the_live_position,
        begin_the_epoch_again,
        leave_the_rest_of_the_epoch_out,
    ],
)
def test_a_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken):
        run(range(SEEDS))
