"""Runs the traces: short stories of jobs in which a reader sees what each node decides, and which the tests compare.

    python -m tests.sim.trace                        # compares every file in tests/sim/traces
    python -m tests.sim.trace --rewrite FILE...      # replaces the output below the commands; read the difference

A trace runs the real agents on the real rendezvous, as `agents` does, in a calm world: every message takes 1 ms, the
clocks agree, workers take 1 s to end when they are stopped (10 s when their node leaves, 50 ms when they are killed),
and nothing happens but the commands. The output leaves out heartbeats, watches and repeated messages. Each line has the
seconds since its command, the node, and what it does.

    job nodes=2:4 restarts=1 last-call=5 rehost     the first command; the defaults are these, without rehost
    join NODE...            start an agent; another one of the same host is a2, a3, ...
    succeed NODE...         its workers end with exit code 0
    fail NODE               a worker fails; `fail NODE for-peer`: because it lost a worker of another node
    kill NODE...            the agent and its workers die; its machine confirms that
    power-off NODE...       its machine is silent
    stop NODE, continue NODE        the machine freezes and wakes up
    leave NODE              SIGTERM to its agent
    interrupt NODE          Ctrl-C at its agent
    restart-store           the store breaks all connections, and keeps what it knows
    lose-store              the store loses its memory
    move NODE... to NODE    these nodes lose the store, and meet at that of another node
    wait SECONDS            let time pass
    stabilize               let time pass until no line has come for a minute, then show the state in the store
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sim.agents import SIGINT, SIGTERM, AgentNode, AgentSimulation
from tests.sim.rendezvous import BAD_TIMES_NS
from tests.sim.rendezvous_checks import Checks
from tests.sim.rendezvous_node import MS, S
from tests.sim.rendezvous_store import SimStore

from ronde.launch.agent import decisions as agent_events
from ronde.rendezvous import effects, state
from ronde.rendezvous.membership import Budget, ChangeRequested, Failure, NodesLost, Rules, WorkerFailed
from ronde.rendezvous.state import STATE, JobPhase, JobState, decode, decode_roster, decode_state

FOLDER = Path(__file__).parent / "traces"
QUIET_NS = 60 * S
MESSAGES = (state.JoinRequest, state.FailureReport, state.SuccessReport, state.LeaveNotice)


class Calm(random.Random):
    """Chooses the first of everything and the middle between two bounds; rare things never happen."""

    def random(self) -> float:
        return 0.999

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0 if stop is None else (start + stop) // 2

    def choice(self, seq: Any) -> Any:
        return seq[0]


class TraceNode(AgentNode):
    """A node that tells what it does."""

    sim: TraceWorld

    def __init__(self, sim: TraceWorld, host: str, start: int) -> None:
        super().__init__(sim, ord(host) - ord("a"), start)
        self.name = f"{host}{start + 1}" if start else host
        self.node = replace(self.node, id=self.name, host=host, meeting=f"tcp:{host}:9")
        self.last_message: tuple[str, Any] | None = None

    def say(self, *words: object) -> None:
        self.sim.say(self.name, *words)

    def has_written(self, raw: bytes) -> None:
        super().has_written(raw)
        written = decode_state(raw)
        for line in self.sim.changes(written):
            self.say(line)
        self.sim.shown = written

    def perform(self, wanted: list[effects.Effect]) -> None:
        for effect in wanted:
            if isinstance(effect, effects.Push):
                said: Any = decode(effect.value, *MESSAGES)
                message = replace(said, seq=0)
                if (
                    effect.queue,
                    message,
                ) != self.last_message:  # else it is repeated, because time has passed
                    self.last_message = effect.queue, message
                    self.say(describe_message(message))
        super().perform(wanted)

    def probe_agents(self, asked: effects.Probe) -> None:
        answers = {"open": "is there", "shut": "has ended", "silent": "does not answer"}
        for node in asked.addresses:
            self.say("asks the machine of", f"{node}: its agent", answers[self.sim.probe_result(self, node)])
        super().probe_agents(asked)

    def tell_agent(self, event: agent_events.Event) -> None:
        if isinstance(event, agent_events.WorkersEnded):
            self.say("workers end", "well" if event.exit_code == 0 else f"with exit code {event.exit_code}")
        super().tell_agent(event)

    def act(self, wanted: list[agent_events.Effect]) -> None:
        for effect in wanted:
            if text := describe_effect(effect):
                self.say(text)
        super().act(wanted)

    def fail(self, blames_peer: bool = False) -> None:
        assert self.round
        why = "lost a peer" if blames_peer else "raised an exception"
        failure = Failure(self.round.group_rank, 0, self.node.host, 1, 1, f"a worker {why}", "", blames_peer)
        self.end_workers(1, failure, 2 * S)
        if not blames_peer:
            self.tell_agent(agent_events.Failing(failure))

    def move(self, store: SimStore, gone: Sequence[str]) -> None:
        self.harm()
        self.store += 1
        self.watches += 1
        self.queue, self.place, self.to_hold = None, store, {}
        self.operations.clear()
        self.is_busy = False
        self.participant.lose_store(broke_now=True)
        self.perform(self.participant.enter_store(self.now_ns(), gone, elsewhere=True))


class TraceWorld(AgentSimulation):
    """A calm world, in which one command after the other happens."""

    nodes: list[Any]

    def __init__(self, job: str) -> None:
        options = dict(word.partition("=")[::2] for word in job.split()[1:])
        least, _, most = options.get("nodes", "2:4").partition(":")
        self.rng = Calm()
        self.crowd = 1.0
        self.now_ns, self.planned = BAD_TIMES_NS + 1, 0
        self.agenda = []
        self.counts = Counter()
        self.events = deque(maxlen=80)
        self.store = SimStore()
        self.restarted_ns = -BAD_TIMES_NS
        self.rules = Rules(
            min_nodes=int(least),
            max_nodes=int(most or least),
            last_call_ns=int(options.get("last-call", 5)) * S,
            rehost="rehost" in options,
        )
        self.budget = Budget(int(options.get("restarts", 1)))
        self.checks = Checks(self.rules, self.budget)
        self.hiccup = 0.0
        self.nodes, self.ids = [], {}
        self.shown: JobState | None = None
        self.began_ns = self.said_ns = self.now_ns
        self.lines: list[str] = []

    def latency_ns(self) -> int:
        return MS

    def draw_work(self, node: Any) -> tuple[int, Any]:
        return 10**17, lambda: None  # until a command ends it

    # What is seen

    def say(self, name: str, *words: object) -> None:
        self.said_ns = self.now_ns
        seconds = (self.now_ns - self.began_ns) / S
        self.lines.append(f"    {seconds:6.1f}  {name:3} {' '.join(map(str, words))}")

    def changes(self, written: JobState) -> Iterator[str]:
        """What is new in the state, compared with the last one."""
        before = self.shown
        if before is None or before.term != written.term:
            yield f"leads, in term {written.term}"
        if before is None or (before.phase, before.number) != (written.phase, written.number):
            yield f"decides: {self.describe_state(written)}"
        for refused in written.refused[len(before.refused) if before else 0 :]:
            yield f"refuses {refused.id}: {refused.reason}"

    def describe_state(self, job: JobState) -> str:
        match job.phase:
            case JobPhase.FORMING:
                cause = job.cause
                match cause:
                    case WorkerFailed(failure):
                        why = f", because {failure.message} on {failure.host}"
                    case None:
                        why = ""
                    case NodesLost() | ChangeRequested():
                        why = f", because {cause.reason}"
                    case _:
                        why = f", because {cause.count} more can take part"
                return f"round {job.number} forms{why}"
            case JobPhase.RUNNING:
                return f"round {job.number} begins with {self.describe_roster(job)}"
            case JobPhase.COMPLETED:
                return "the job has completed"
            case JobPhase.CLOSED:
                return f"the job is closed: {job.reason}"

    def describe_roster(self, job: JobState) -> str:
        assert job.roster
        parts = (self.store.values.get(key) for key in job.roster.keys)
        return " ".join(node.id for node in decode_roster(tuple(part for part in parts if part)))

    def summary(self) -> str:
        raw = self.store.values.get(STATE)
        if raw is None:
            return "the store is empty"
        job = decode_state(raw)
        members = f" with {self.describe_roster(job)}" if job.phase == JobPhase.RUNNING else ""
        counts = f"restarts: {job.restarts}, changes: {job.changes}"
        return f"term {job.term} of {job.leader}, round {job.number} {job.phase}{members}; {counts}"

    # What is done

    def do(self, command: str) -> list[str]:
        """Run one command; returns its output."""
        verb, *words = command.split()
        self.lines = []
        self.began_ns = self.said_ns = self.now_ns
        match verb:
            case "wait":
                self.pass_time(int(words[0]) * S)
            case "stabilize":
                while self.now_ns - self.said_ns < QUIET_NS:
                    self.pass_time(S)
                self.lines.append(f"    {self.summary()}")
            case "restart-store":
                self.restart_store()
            case "lose-store":
                self.forget_everything()
            case "move":
                self.move(words[:-2], words[-1])
            case "join":
                for host in words:
                    self.join(host)
            case _:
                for name in words[:1] if verb == "fail" else words:
                    self.do_to(verb, self.by_id(name), words)
        self.pass_time(0)
        return self.lines

    def pass_time(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.agenda and self.agenda[0][0] <= end_ns:
            at_ns, _, do = heapq.heappop(self.agenda)
            self.now_ns = max(at_ns, self.now_ns)
            do()
        self.now_ns = end_ns

    def join(self, host: str) -> None:
        start = sum(node.node.host == host for node in self.nodes)
        node = TraceNode(self, host, start)
        self.nodes.append(node)
        self.at(self.now_ns, node.start)

    def do_to(self, verb: str, node: Any, words: Sequence[str]) -> None:
        match verb:
            case "succeed":
                self.checks.succeeded.setdefault(node.round.number, set()).add(node.node.id)
                node.succeed()
            case "fail":
                node.fail("for-peer" in words)
            case "kill" | "power-off":
                self.tell_fate(node, verb)
                node.die(is_noticed=verb == "kill")
            case "stop":
                self.tell_fate(node, verb)
                node.is_frozen = True
                node.harm()
            case "continue":
                node.thaw()
            case "leave":
                node.is_harmed = True
                self.signal(node, verb, SIGTERM)
            case "interrupt":
                self.signal(node, verb, SIGINT)
            case _:
                raise ValueError(f"unknown command {verb!r}: see the header of tests/sim/trace.py")

    def forget_everything(self) -> None:
        self.checks.leader_harmed_ns = self.now_ns
        self.checks.lost_store()
        self.store.forget()
        for node in self.nodes:
            if node.is_alive:
                node.lose_store()

    def move(self, names: Sequence[str], to: str) -> None:
        self.store = SimStore()
        self.checks.leader_harmed_ns = self.now_ns
        gone = [node.node.id for node in self.nodes if not node.is_alive]
        for name in sorted(names, key=lambda name: name != to):
            node: Any = self.by_id(name)
            node.move(self.store, gone)


def run_trace(text: str) -> str:
    """Return the text with what happens now below each command."""
    world: TraceWorld | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            if world is None:
                world = TraceWorld(line)
            else:
                lines += world.do(line)
    return "\n".join(lines) + "\n"


def describe_message(message: Any) -> str:
    match message:
        case state.JoinRequest(_, _, after):
            return "asks for a place" if after < 0 else f"asks for a place after round {after}"
        case state.FailureReport(_, _, number, failure):
            return f"reports a failure in round {number}: {failure.message}"
        case state.SuccessReport(_, _, number):
            return f"reports success in round {number}"
        case state.LeaveNotice(reason=reason):
            return f"gives notice that it leaves: {reason}"
    raise TypeError(message)


def describe_effect(effect: agent_events.Effect) -> str:
    match effect:
        case agent_events.StartWorkers(round, again):
            last = "" if again else "; a failure would be the last"
            return f"starts workers of round {round.number} as node {round.group_rank} of {len(round.nodes)}{last}"
        case agent_events.StopWorkers(reason, at_once):
            return f"{'kills' if at_once else 'stops'} its workers: {reason}"
        case agent_events.AgentNotice(text):
            return f"prints: {text}"
        case agent_events.EndJob(reason):
            return f"ends the job: {reason}"
        case agent_events.AgentEnd(code, reason):
            return f"exits with code {code}: {reason}" if reason else f"exits with code {code}"
    return ""  # the messages to the leader say the rest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the golden traces of the rendezvous.")
    parser.add_argument("--rewrite", action="store_true", help="replace the output in the files")
    parser.add_argument("files", nargs="*", type=Path, help="default: all")
    arguments = parser.parse_args(argv)
    differing = 0
    for path in arguments.files or sorted(FOLDER.glob("*.txt")):
        before = path.read_text()
        after = run_trace(before)
        if before != after:
            differing += 1
            print(f"{path} {'is new now' if arguments.rewrite else 'differs'}")
            if arguments.rewrite:
                path.write_text(after)
    return 0 if arguments.rewrite else differing


if __name__ == "__main__":
    sys.exit(main())
