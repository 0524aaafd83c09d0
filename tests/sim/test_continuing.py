"""Runs simulated jobs whose workers continue, and makes sure that the simulation would notice if these were wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.sim.common_order import Broken
from tests.sim.continuing import ContinuingNode, ContinuingSimulation, SimWorker
from tests.sim.rendezvous import draw_nodes, simulate

from ronde.launch.agent.decisions import (
    TRANSITIONS,
    Healthy,
    Rejoining,
    Stopping,
    StopWorkers,
    WorldLeft,
)
from ronde.launch.agent.reserve import Reserve
from ronde.launch.agent.worker_group import WorkerGroup
from ronde.rendezvous.leader import Leader
from ronde.rendezvous.member import Member
from ronde.rendezvous.membership import Ejected, RoundEnded

BATCH = 25

WHAT_HAPPENS = {
    "ejected",
    "exit code 0",
    "exit code 143",
    "failures",
    "planned changes",
    "workers from the reserve",
    "workers that go on in place",
    "worlds",
}


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulate(seed, draw_nodes(seed), ContinuingSimulation)
    return counts


@pytest.mark.parametrize(
    "first", [pytest.param(i * BATCH, marks=[pytest.mark.slow] if i else []) for i in range(4)]
)
def test_some_seeds_with_up_to_30_nodes(first: int) -> None:
    assert set(run(range(first, first + BATCH))) >= WHAT_HAPPENS, "the simulations have become dull"


@pytest.mark.parametrize(
    ("seed", "nodes"),
    [
        pytest.param(893, 4, id="a reserve is ready while the node leaves"),
        pytest.param(1061, 2, id="a node comes back from a long silence to a store that has lost its data"),
        pytest.param(1341, 3, id="a worker that is still in a world has its next place"),
        pytest.param(334, 24, id="a frozen node is interrupted before it hears of a round that has ended"),
        pytest.param(2305, 4, id="a node is cut off while its workers wait for a place"),
        pytest.param(
            2718, 4, id="the store is lost before a node that was cut off hears of the end of a round"
        ),
        pytest.param(708, 4, id="a node that was cut off writes an old state"),
        pytest.param(3011, 6, id="an old state would end a round that runs"),
        pytest.param(5339, 2, id="only a frozen node knows the last round"),
        pytest.param(70306, 2, id="a node ends the job in a store that has lost its data"),
    ],
)
def test_a_seed_that_has_found_something(seed: int, nodes: int) -> None:
    simulate(seed, nodes, ContinuingSimulation)


@pytest.mark.slow
def test_200_nodes() -> None:
    simulate(2, 200, ContinuingSimulation)


# Agents and workers that are wrong in one way.


def end_all_workers_with_the_round(patch: pytest.MonkeyPatch) -> None:
    end = TRANSITIONS[Healthy, RoundEnded]

    def broken(*arguments: Any) -> Any:
        state, effects = end(*arguments)
        return state, [
            StopWorkers(each.reason) if isinstance(each, StopWorkers) else each for each in effects
        ]

    patch.setitem(TRANSITIONS, (Healthy, RoundEnded), broken)


def join_before_those_that_do_not_continue_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerGroup, "_remaining", lambda self: ())


def signal_survivors_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerGroup, "_spares_survivors", property(lambda self: False))


def keep_workers_that_others_take_for_dead(patch: pytest.MonkeyPatch) -> None:
    for state in (Rejoining, Stopping):
        patch.delitem(TRANSITIONS, (state, Ejected))
    patch.setattr(Member, "update_node", lambda self, node: None)


def keep_workers_without_which_others_have_worked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ContinuingNode, "end_workers_of_old_state", lambda self: None)


def never_ask_for_the_next_round(patch: pytest.MonkeyPatch) -> None:
    patch.delitem(TRANSITIONS, (Healthy, WorldLeft))


def come_to_the_world_of_an_earlier_place(patch: pytest.MonkeyPatch) -> None:
    come = SimWorker.come

    def broken(self: SimWorker) -> None:
        if self.is_alive and self.world is None and self.told > 0 and self.told > self.left + 1:
            self.told -= 1
        come(self)

    patch.setattr(SimWorker, "come", broken)


def begin_with_too_few_workers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "_has_enough_slots", lambda self, size: True)


def promote_a_spare_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reserve, "take_ready", lambda self: self.ready[0] if self.ready else None)


def promote_a_spare_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reserve, "note_ended", lambda self, now_ns, key: 0)


def promote_a_spare_that_is_not_ready(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Reserve) -> int | None:
        return self.ready.pop() if self.ready else next(iter(self._starting), None)

    patch.setattr(Reserve, "take_ready", broken)


@pytest.mark.parametrize(
    ("plant", "first_seed"),
    [
        (promote_a_spare_twice, 5),
        (promote_a_spare_that_has_ended, 7),
        (promote_a_spare_that_is_not_ready, 1),
        (end_all_workers_with_the_round, 2),
        (signal_survivors_after_a_failure, 2),
        (come_to_the_world_of_an_earlier_place, 2),
        (keep_workers_that_others_take_for_dead, 81),
        (join_before_those_that_do_not_continue_are_gone, 38),
        (never_ask_for_the_next_round, 48),
        (keep_workers_without_which_others_have_worked, 35),
        (begin_with_too_few_workers, 109),
    ],
)
def test_a_planted_bug_is_found(plant: object, first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(plant)
    plant(monkeypatch)
    with pytest.raises((Broken, AssertionError)):
        run(range(first_seed, first_seed + 100))
