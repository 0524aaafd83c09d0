"""Simulates jobs: the real agents on the real rendezvous, with workers that run, fail and take their time to end.

    python -m tests.sim.agents --seeds 100000
    python -m tests.sim.agents --seed 7 --nodes 64

The world is that of `rendezvous`, with all that happens there; only that joining, stopping and telling is decided by
`ronde.launch.agent.decisions`. Checked is, beside what is checked there: a node never runs two sets of workers at
once; it starts them in a round only; no node has workers of an earlier round when a later one begins, unless it is
frozen; every agent that lives ends, with the exit code that fits what has become of the job.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.sim.common_order import require
from tests.sim.rendezvous import BAD_TIMES_NS, Simulation, main
from tests.sim.rendezvous_node import MS, S, SimNode

from ronde.launch.agent.decisions import (
    Agent,
    AgentEnd,
    Effect,
    EndJob,
    Event,
    Failing,
    InterruptAgent,
    JoinRound,
    LeaveJob,
    ReportFailure,
    ReportSuccess,
    StartWorkers,
    StopWorkers,
    WorkersEnded,
)
from ronde.rendezvous.leader import STRAGGLER_NS
from ronde.rendezvous.membership import (
    AllSucceeded,
    Ejected,
    Failure,
    JobClosed,
    RendezvousBroken,
    RendezvousEvent,
    RoundBegan,
    RoundEnded,
)

SIGINT, SIGTERM = 2, 15
FOREVER_NS = 10**18
STOPPED = 143
LONGEST_END_NS = 20 * S  # of workers that are to save what they have


class AgentNode(SimNode):
    """A node with the real agent, and workers that are told by `draw_work` what they do."""

    def __init__(self, sim: Simulation, host: int, start: int) -> None:
        super().__init__(sim, host, start)
        self.agent = Agent(sim.budget, FOREVER_NS)
        self.workers = False  # whether there are processes
        self.worked_in = -1  # the round that they are of
        self.last: RendezvousEvent | None = None  # after which there is nothing more
        self.interrupted = False
        self.has_exited = False

    def start(self) -> None:
        self.act(self.agent.begin())

    def tell_agent(self, event: Event) -> None:
        self.act(self.agent.step(self.now_ns(), event))

    def told(self, event: RendezvousEvent) -> None:
        if self.has_exited:
            return
        checks = self.sim.checks
        self.sim.note(self.name, "is told", event)
        match event:
            case RoundBegan():
                self.recover()
            case RoundEnded(number, cause):
                checks.ended(self, number, cause)
                self.round = None
            case Ejected():
                self.sim.counts["ejected"] += 1
                checks.harmed(self, event)
                self.round = None
            case AllSucceeded(number):
                checks.all_succeeded(self, number)
                self.last = event
            case JobClosed():
                self.last = event
            case RendezvousBroken():
                checks.gave_up(self, self.sim.nodes)
                self.last = event
        self.tell_agent(event)

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case JoinRound():
                    require(not self.workers, self.name, "joins while it has workers")
                    super().start()
                case StartWorkers(round):
                    require(not self.workers, self.name, "has workers twice")
                    self.sim.checks.began(self, round)
                    assert isinstance(self.sim, AgentSimulation)
                    self.sim.check_alone(round.number)
                    self.round, self.workers, self.worked_in = round, True, round.number
                    self.plan(*self.sim.draw_work(self))
                case StopWorkers(_, at_once=True):
                    self.end_workers(STOPPED, None, S // 10)
                case StopWorkers():
                    require(self.workers, self.name, "has no workers to stop")
                    slow = self.sim.rng.random() < 0.1 / self.sim.crowd
                    self.is_harmed = self.is_harmed or slow
                    self.end_workers(STOPPED, None, STRAGGLER_NS if slow else 2 * S)
                    if slow and self.sim.now_ns < BAD_TIMES_NS and self.sim.rng.random() < 0.3:
                        self.later(self.sim.rng.randrange(S), self.cut_off)
                case ReportFailure(failure):
                    self.perform(self.participant.fail(failure))
                case ReportSuccess():
                    super().succeed()
                case EndJob():
                    self.end_job()
                case LeaveJob(reason):
                    self.perform(self.participant.leave(reason, LONGEST_END_NS if self.workers else 0))
                case AgentEnd():
                    self.exited(effect)

    # The workers

    def succeed(self) -> None:
        self.workers = False
        self.tell_agent(WorkersEnded(0, ""))

    def fail(self, blames_peer: bool = False) -> None:
        if self.round is None or not self.workers:
            return
        self.sim.counts["failures"] += 1
        failure = Failure(self.round.group_rank, 0, self.node.host, 1, 1, f"by {self.name}", "", blames_peer)
        self.end_workers(1, failure, 2 * S)
        if not blames_peer:
            self.tell_agent(Failing(failure))

    def end_workers(self, exit_code: int, failure: Failure | None, within_ns: int) -> None:
        """They end soon, whatever they would have done."""

        def gone() -> None:
            self.workers = False
            self.tell_agent(WorkersEnded(exit_code, "", failure))

        self.plan(self.sim.rng.randrange(10 * MS, within_ns), gone)

    # The end

    def interrupt(self, signum: int) -> None:
        if self.workers and not self.interrupted:  # a second signal gives them no more time
            self.end_workers(128 + signum, None, S if signum == SIGINT else LONGEST_END_NS)
        self.interrupted = self.is_leaving = True
        self.tell_agent(InterruptAgent(signum, "interrupted"))

    def exited(self, exit: AgentEnd) -> None:
        require(not self.workers, self.name, "exits while it has workers")
        self.has_exited = True
        self.sim.counts[f"exit code {exit.exit_code}"] += 1
        if self.interrupted or self.last is None:
            require(self.interrupted, self.name, "exits without a reason")
            self.later(self.sim.rng.randrange(S), self.close)
            return
        match self.last:
            case AllSucceeded() | JobClosed(_, _, True):
                require(exit.exit_code == 0, self.name, "has succeeded, and exits with", exit.exit_code)
            case JobClosed():
                require(exit.exit_code != 0, self.name, "exits well, though the job was closed")
        self.finish(self.last)


class AgentSimulation(Simulation):
    node_type: type[AgentNode] = AgentNode
    module = "tests.sim.agents"

    def check_alone(self, number: int) -> None:
        """No node has workers of an earlier round, but for those that are frozen."""
        for other in self.nodes:
            assert isinstance(other, AgentNode)
            if other.workers and other.is_alive and other.worked_in < number:
                excused = other.is_frozen or other.thawed_ns + S > self.now_ns
                require(excused, other.name, "still has workers of round", other.worked_in, "in", number)

    def draw_fates(self, nodes: int) -> None:
        super().draw_fates(nodes)
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            self.at(self.rng.randrange(BAD_TIMES_NS), self.cut_off)

    def cut_off(self) -> None:
        if node := self.victim():
            self.tell_fate(node, "is cut off")
            node.cut_off()

    def leave(self) -> None:
        if node := self.victim():
            node.is_harmed = True
            self.signal(node, "leaves", SIGTERM)

    def interrupt(self, node: Any) -> None:
        node.later(0, lambda: self.signal(node, "ends the job", SIGINT))

    def signal(self, node: Any, what: str, signum: int) -> None:
        if not node.has_exited:
            self.tell_fate(node, what)
            node.interrupt(signum)


if __name__ == "__main__":
    sys.exit(main(None, AgentSimulation))
