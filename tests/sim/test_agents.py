"""Runs the simulated agents, and makes sure that the simulation would notice if they were wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.sim.agents import AgentSimulation
from tests.sim.common_order import Broken
from tests.sim.rendezvous import Simulation, draw_nodes, simulate

from ronde.core.agent import Agent, Effect, Failing, JoinRound, ReportFailure, ReportSuccess, WorkersGone
from ronde.core.rendezvous.lease import LeftoverWorkers

WHAT_HAPPENS = {
    "a node dies",
    "a node freezes",
    "a node leaves",
    "a node ends the job",
    "ejected",
    "exit code 0",
    "exit code 1",
    "exit code 130",
    "exit code 143",
    "failures",
    "late nodes",
}


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulate(seed, draw_nodes(seed), AgentSimulation)
    return counts


def test_some_seeds_with_up_to_30_nodes() -> None:
    assert set(run(range(120))) >= WHAT_HAPPENS, "the simulations have become dull"


def test_100_nodes() -> None:
    simulate(5, 100, AgentSimulation)


@pytest.mark.slow
def test_1000_nodes() -> None:
    simulate(1, 1000, AgentSimulation)


@pytest.mark.slow
def test_500_more_seeds() -> None:
    run(range(10_000, 10_500))


# Agents that are wrong in one way.


def join_before_the_workers_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_again", lambda self: [JoinRound()])


def call_it_success_when_workers_were_stopped(patch: pytest.MonkeyPatch) -> None:
    gone = Agent._gone

    def broken(self: Agent, now_ns: int, event: WorkersGone) -> list[Effect]:
        return [ReportSuccess()] if event.exit_code == 143 and self._rejoin else gone(self, now_ns, event)

    patch.setattr(Agent, "_gone", broken)


def keep_a_failure_to_oneself(patch: pytest.MonkeyPatch) -> None:
    failing = Agent._failing

    def broken(self: Agent, failure: Failing) -> list[Effect]:
        return [effect for effect in failing(self, failure) if not isinstance(effect, ReportFailure)]  # type: ignore[arg-type]

    patch.setattr(Agent, "_failing", broken)


def leave_without_a_word_when_others_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_again", lambda self: [])


def begin_before_the_workers_of_a_lost_node_have_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeftoverWorkers, "add_lost_node", lambda self, node, received_ns: None)


def begin_before_the_workers_of_a_node_that_leaves_have_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeftoverWorkers, "expect_end", lambda self, node, end_ns: None)


def take_silence_for_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulation, "door", lambda self, node, other: "shut")


@pytest.mark.parametrize(
    ("plant", "first_seed"),
    [
        (begin_before_the_workers_of_a_lost_node_have_ended, 70),
        (begin_before_the_workers_of_a_node_that_leaves_have_ended, 0),
        (take_silence_for_an_end, 70),
        (join_before_the_workers_are_gone, 0),
        (call_it_success_when_workers_were_stopped, 0),
        (keep_a_failure_to_oneself, 0),
        (leave_without_a_word_when_others_are_lost, 0),
    ],
)
def test_a_planted_bug_is_found(plant: object, first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(plant)
    plant(monkeypatch)
    with pytest.raises((Broken, AssertionError)):
        run(range(first_seed, first_seed + 150))
