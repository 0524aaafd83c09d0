"""Runs the simulated agents, and makes sure that the simulation would notice if they were wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.sim.agents import AgentSimulation
from tests.sim.common_order import Broken
from tests.sim.rendezvous import Simulation, draw_nodes, simulate

from ronde.launch.agent.decisions import (
    TRANSITIONS,
    Agent,
    Failing,
    Healthy,
    Joining,
    JoinRound,
    ReportSuccess,
    Stopping,
    Unhealthy,
    WorkersEnded,
)
from ronde.rendezvous.leader import Leader
from ronde.rendezvous.liveness import LeftoverWorkers
from ronde.rendezvous.member import Member, _MemberPhase
from ronde.rendezvous.membership import Ejected, RoundEnded

BATCH = 60

WHAT_HAPPENS = {
    "a node dies",
    "a node freezes",
    "a node is cut off",
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


@pytest.mark.parametrize(
    "first", [pytest.param(i * BATCH, marks=[pytest.mark.slow] if i else []) for i in range(2)]
)
def test_some_seeds_with_up_to_30_nodes(first: int) -> None:
    assert set(run(range(first, first + BATCH))) >= WHAT_HAPPENS, "the simulations have become dull"


@pytest.mark.slow
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
    for state in Healthy, Unhealthy:
        for event in RoundEnded, Ejected:
            patch.setitem(TRANSITIONS, (state, event), lambda *_: (Joining(True), [JoinRound()]))


def call_it_success_when_workers_were_stopped(patch: pytest.MonkeyPatch) -> None:
    join = TRANSITIONS[Stopping, WorkersEnded]

    def broken(agent: Agent, now_ns: int, state: Any, event: Any) -> Any:
        return (state, [ReportSuccess()]) if event.exit_code == 143 else join(agent, now_ns, state, event)

    patch.setitem(TRANSITIONS, (Stopping, WorkersEnded), broken)


def keep_a_failure_to_oneself(patch: pytest.MonkeyPatch) -> None:
    fail = TRANSITIONS[Healthy, Failing]
    patch.setitem(TRANSITIONS, (Healthy, Failing), lambda *arguments: (fail(*arguments)[0], []))


def leave_without_a_word_when_others_are_lost(patch: pytest.MonkeyPatch) -> None:
    for state, event in list(TRANSITIONS):
        if event in (RoundEnded, Ejected):
            patch.delitem(TRANSITIONS, (state, event))


def begin_before_the_workers_of_a_lost_node_have_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeftoverWorkers, "add_lost_node", lambda self, node, received_ns: None)


def begin_before_the_workers_of_a_node_that_leaves_have_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeftoverWorkers, "expect_end", lambda self, node, end_ns: None)


def ignore_a_lease_that_a_lost_node_renews(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "_note_late_heartbeat", lambda self, now_ns, node: None)


def forget_workers_that_are_still_ending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "is_working", property(lambda self: self._phase == _MemberPhase.WORKING))


def take_silence_for_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulation, "probe_result", lambda self, node, other: "shut")


@pytest.mark.parametrize(
    ("plant", "first_seed"),
    [
        (begin_before_the_workers_of_a_lost_node_have_ended, 70),
        (begin_before_the_workers_of_a_node_that_leaves_have_ended, 0),
        (ignore_a_lease_that_a_lost_node_renews, 304),
        (forget_workers_that_are_still_ending, 590),
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
