"""Ranks that come to epochs in every order, simulated; and mistakes, which the simulation notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sim import world_epochs
from tests.sim.common_order import Broken
from tests.sim.world_epochs import Simulation

from ronde.comm.world_epochs import (
    CompareSet,
    Ending,
    Epoch,
    SetValue,
    Steps,
    WorldKeys,
    come_to_epoch,
    end_value,
)

SEEDS = 300


def sweep(seeds: range) -> None:
    for seed in seeds:
        try:
            Simulation(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_ranks_meet_after_any_faults() -> None:
    sweep(range(SEEDS))


original_come_to_epoch = come_to_epoch


def counting_its_own_calls(
    keys: WorldKeys, rank: int, member: bytes, last: Epoch | None, word: str, has_formed: bool
) -> Steps[Epoch]:
    epoch = last.following if last else Epoch("word", 0)
    yield SetValue(keys.member(epoch, rank), member)
    return epoch


def without_moving_on(
    keys: WorldKeys, rank: int, member: bytes, last: Epoch | None, word: str, has_formed: bool
) -> Steps[Epoch]:
    found = yield CompareSet(keys.counter, b"", Epoch(word, 0).encode())
    yield SetValue(keys.member(Epoch.decode(found), rank), member)
    return Epoch.decode(found)


def without_a_word(
    keys: WorldKeys, rank: int, member: bytes, last: Epoch | None, word: str, has_formed: bool
) -> Steps[Epoch]:
    return (yield from original_come_to_epoch(keys, rank, member, last, "word", has_formed))


def without_an_ending(
    keys: WorldKeys, rank: int, member: bytes, last: Epoch | None, word: str, has_formed: bool
) -> Steps[Epoch]:
    return (yield from original_come_to_epoch(keys, rank, member, last, word, has_formed=True))


def ending_at_any_time(keys: WorldKeys, epoch: Epoch, stage: int, ending: Ending) -> Steps[None]:
    yield SetValue(keys.outcome(epoch, stage), end_value(ending))


@pytest.mark.parametrize(
    "bug",
    [counting_its_own_calls, without_moving_on, without_a_word, without_an_ending, ending_at_any_time],
)
def test_planted_bugs_are_found(bug: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "end_epoch" if bug is ending_at_any_time else "come_to_epoch"
    monkeypatch.setattr(world_epochs, name, bug)
    with pytest.raises((AssertionError, Broken, KeyError)):
        sweep(range(SEEDS))


@pytest.mark.slow
def test_ranks_meet_after_any_faults_with_many_seeds() -> None:
    sweep(range(SEEDS, 10 * SEEDS))  # by night: tests.sim.night
