"""The driver of a job whose agents it starts itself: on hosts, or in the slots of a cluster.

One thread runs one loop, and the store of the job, in which the agents meet, has another thread.
`launch/driver/host_health` decides which hosts take part; the agents decide among themselves when workers start and
stop. An agent leaves when its standard input ends, so nothing outlives the driver. What differs between hosts and tasks
is the `Placement`: `HostAgents` has hosts, reached by ssh, or this machine; `TaskAgents` has tasks, which a cluster
starts in its slots.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from ronde.errors import RondeError
from ronde.launch.agent.failure_report import report_elsewhere
from ronde.launch.agent.worker_group import HASTY, TYPED, describe_interrupt
from ronde.launch.config import LaunchConfig
from ronde.launch.driver import host_health as health
from ronde.launch.driver.agent_process import AgentPhase, AgentProcess, Chorus
from ronde.launch.driver.driver_messages import LAST_WORD, LastWord, ended_key
from ronde.launch.hosts.host_list import Host
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import Screen, Streams
from ronde.net.descriptor_limit import raise_descriptor_limit
from ronde.process.disk import Disk
from ronde.process.error_file import ERROR_FILE, hand_up
from ronde.process.process_groups import SignalInbox
from ronde.rendezvous.membership import Failure
from ronde.stores.tcp import StoreClient

__all__ = ["Driver", "JobEnd", "Placement"]

SECOND = 10**9
FAILED, USAGE_ERROR = 1, 2
GOODBYE_NS = 15 * SECOND  # how long agents may take to end after their workers


class Placement(Protocol):
    """Where the agents of one job run. The driver calls everything in the thread of its loop.

    `is_given_by_user`: whether the user has named the hosts, so that one that cannot be reached is the user's mistake.
    `limits`: which hosts take part. `config`: of all agents; each one adds its slots and addresses. `store`: in which
    the agents meet, once `open` has been called.
    """

    is_given_by_user: bool
    limits: health.Limits
    config: LaunchConfig
    store: StoreClient

    def open(self, driver: Driver) -> None:
        """Serve what agents need to reach the driver, and offer the first hosts by `driver.offer_hosts`."""

    def start_agents(self, hosts: Sequence[Host]) -> None:
        """Have an agent started on each host, and give it to the driver by `driver.add_agent`."""

    def greeted(self, agent: AgentProcess) -> None:
        """Give the agent, which has said hello, its assignment, now or later."""

    def is_replaced(self, agent: AgentProcess) -> bool:
        """Return whether another agent comes in the place of one that has ended; it has been added then."""

    def explain_shortage(self, reason: str) -> str:
        """Return the reason why there are too few hosts, with what this placement knows about it."""

    def end(self) -> None:
        """Start no more agents: the job is over, and running ones are about to end."""

    def close(self) -> None:
        """Close everything. Agents that still run are ended."""


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. `reason`: why the driver ended it; empty if an agent's result did. `failure`: the first one."""

    exit_code: int
    reason: str
    failure: Failure | None = None


class Driver:
    """The shell around one `HostHealth`; what it opens belongs to the stack."""

    def __init__(
        self,
        placement: Placement,
        environment: Mapping[str, str],
        stack: ExitStack,
        streams: Streams = (None, None),
    ) -> None:
        self._placement = placement
        self._environment = environment
        self._health = health.HostHealth(placement.limits)
        self._agents: dict[str, AgentProcess] = {}
        self._chorus = Chorus()
        self._events: deque[health.Event] = deque()
        self._reached = False  # whether the job has had all hosts that it needs
        self._refused = False  # whether a host has refused the configuration since then
        self._word: LastWord | None = None  # an agent's result that ended the job
        self._reason = ""  # ... or why the driver ended it
        # The result of the last agent that gave way.
        self._gave_way: LastWord | None = None
        self._code = 0
        self._over = False
        self._hurry = False  # a signal came after the end
        self._typed = 0  # how many times the user typed a signal
        raise_descriptor_limit()  # four for each agent
        self.loop = Loop()
        stack.callback(self.loop.close)
        self._inbox = stack.enter_context(SignalInbox(placement.config.worker.signals))
        self._screen = Screen(self.loop, lambda: self.interrupt(signal.SIGPIPE), streams)
        stack.callback(self._screen.close)
        stack.callback(placement.close)
        stack.callback(self._close_agents)

    def run(self) -> JobEnd:
        """Run the job to its end; return how it ended."""
        self.loop.watch(self._inbox.fileno(), Order.SIGNALS, self._read_signals)
        self._placement.open(self)
        self._beat()
        while self._agents or not self._over:
            self._turn()
        return JobEnd(
            self._code,
            self._reason or (self._word.reason if self._word else ""),
            self._word.failure if self._word else None,
        )

    def show_rest(self) -> None:
        """Wait until everything is shown, or a signal ends the wait."""
        while self._screen.waiting and not self._hurry:
            self._turn()

    def _turn(self) -> None:
        self._screen.balance()
        for agent in self._agents.values():
            agent.balance()
        self.loop.turn()

    def _beat(self) -> None:
        for agent in list(self._agents.values()):
            agent.send_heartbeat()
        next_ns = time.monotonic_ns() + self._placement.config.rendezvous.heartbeat_ns
        self.loop.set_timer(self._beat, next_ns, self._beat)

    # What happens

    def _read_signals(self) -> None:
        for signum in self._inbox.read():
            self.interrupt(signum)

    def interrupt(self, signum: int) -> None:
        """Pass on a signal to all agents; the first one ends the job."""
        self._hurry = self._over and not self._agents
        self._typed += signum in TYPED
        if not self._reason and not self._word:
            self._end_job(describe_interrupt(signum), 128 + signum, signum)
        else:
            for agent in list(self._agents.values()):
                agent.send_signal(signum) if self._typed < 3 else agent.kill()

    def offer_hosts(self, hosts: tuple[Host, ...]) -> None:
        """Let the job take place on these hosts, instead of the last ones."""
        self._step_health(health.Offered(hosts))

    def fail_host(self, name: str, reason: str) -> None:
        """Note that no agent could be started on a host."""
        self._step_health(health.HostFailed(name, reason))

    def give_up(self, reason: str, exit_code: int = FAILED) -> None:
        """End the job, unless it has ended."""
        if not self._over:
            self._end_job(reason, exit_code, signal.SIGTERM)

    def _step_health(self, event: health.Event) -> None:
        """Step the machine by one event after the other, including those that arise while it performs effects."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            self._perform_effects(self._health.step(time.monotonic_ns(), self._events[0]))
            self._events.popleft()

    def _perform_effects(self, effects: list[health.Effect]) -> None:
        starts = [effect.host for effect in effects if isinstance(effect, health.Start)]
        for effect in effects:
            match effect:
                case health.Start(host):
                    if starts and host == starts[0]:  # all of them in the place of the first
                        self._placement.start_agents(starts)
                case health.StopHost(name, reason):
                    self.say(reason)
                    self._agents[name].ask_to_leave()
                case health.HostNotice(text):
                    self.say(text)
                case health.SetHostTimer(at_ns):
                    self.loop.set_timer(self._health, at_ns, lambda: self._step_health(health.HostTimer()))
                case health.GiveUp(reason) if self._gave_way:
                    self.say(reason)
                    self._word = self._gave_way
                    self._end_job("", self._word.exit_code, signal.SIGTERM)
                case health.GiveUp(reason):
                    reason = self._placement.explain_shortage(reason)
                    unreached = not self._reached and self._placement.is_given_by_user
                    is_usage_error = self._refused or unreached
                    self._end_job(reason, USAGE_ERROR if is_usage_error else FAILED, signal.SIGTERM)

    # Agents

    def add_agent(self, name: str, id: str) -> AgentProcess:
        """Return a new agent on the host of that name, as yet without streams."""
        agent = AgentProcess(
            name, id, self.loop, self._screen, self._chorus, self._placement.greeted, self._ended
        )
        self._agents[name] = agent
        return agent

    def agent(self, name: str) -> AgentProcess | None:
        """Return the present agent of a host, if there is one."""
        return self._agents.get(name)

    def running_slots(self) -> int:
        """Return the number of slots of the agents that have their assignments."""
        there = {name for name, agent in self._agents.items() if agent.phase is AgentPhase.RUNNING}
        return sum(host.slots for host in self._health.running() if host.name in there)

    def note_assigned(self) -> None:
        """Note that an agent has its assignment."""
        if self.running_slots() >= self._health.limits.min_slots:
            self._reached, self._refused = True, False

    def _ended(self, agent: AgentProcess) -> None:
        self.loop.set_timer(agent, None, lambda: None)
        if self._agents.get(agent.name) is not agent:
            return  # another attempt has taken its place
        del self._agents[agent.name]
        if self._placement.is_replaced(agent):
            return
        word = self._last_word(agent)
        if self._over:
            if word and word.failure and not self._reason and _knows_better(word.failure, self._word):
                self._word, self._code = word, word.exit_code
            return
        stopped = all(host.name != agent.name for host in self._health.running())
        if stopped:
            self._step_health(health.HostEnded(agent.name))
        elif word is None or (word.exit_code not in (0, FAILED) and not word.failure):
            if word and word.exit_code == USAGE_ERROR:
                self._refused = True  # the configuration is at fault, not the host
            self._step_health(health.HostFailed(agent.name, word.reason if word else agent.why))
        elif word.gave_way and any(host.name != agent.name for host in self._health.running()):
            self._gave_way = word
            self._step_health(health.HostFailed(agent.name, word.reason))
        else:
            self._word, self._code = word, word.exit_code
            self._finish_job(farewell=True)  # a worker on another host may still end after its exception

    def _last_word(self, agent: AgentProcess) -> LastWord | None:
        try:
            return LAST_WORD.decode(self._placement.store.get(ended_key(agent.id), 0))
        except RondeError:
            return None

    def _close_agents(self) -> None:
        for agent in list(self._agents.values()):
            agent.close()

    # The end

    def _end_job(self, reason: str, code: int, signum: int) -> None:
        """End the job on all hosts."""
        self._reason, self._code, self._over = reason, code, True
        for agent in list(self._agents.values()):
            agent.send_signal(signum)
        self._finish_job(farewell=signum not in HASTY)

    def _finish_job(self, farewell: bool = False) -> None:
        """Note the job's end, and give the remaining agents time to learn of it and end."""
        self._over = True
        self._step_health(health.JobOver())
        self._placement.end()
        for agent in list(self._agents.values()):
            if agent.phase is not AgentPhase.RUNNING:
                agent.kill()
        spec = self._placement.config.worker
        wait_ns = spec.longest_end_ns(farewell) + GOODBYE_NS
        self.loop.set_timer(self, time.monotonic_ns() + wait_ns, self._hang_up)

    def _hang_up(self) -> None:
        for agent in list(self._agents.values()):
            agent.kill("did not end")

    def say(self, text: str) -> None:
        """Show a line of the driver."""
        self._screen.say(f"ronde: {text}".encode(errors="backslashreplace"))

    def report(self, outcome: JobEnd) -> None:
        """Show why the job failed: the first failure, on any host, and at the end the last output of its worker."""
        if outcome.exit_code:
            if outcome.failure is not None and (path := self._environment.get(ERROR_FILE)):
                try:
                    failure = outcome.failure
                    Disk().ask(lambda: hand_up(path, failure))
                except OSError as error:
                    self.say(f"cannot write the error file {path}: {error.strerror or error}")
            for line in report_elsewhere(outcome.reason, outcome.failure):
                self._screen.say(line)
        self.show_rest()


def _knows_better(failure: Failure, known: LastWord | None) -> bool:
    """Return whether an agent's later result names the cause of a failure where the known one blames a lost peer."""
    if known is None or known.failure is None:
        return True
    return known.failure.blames_peer and not failure.blames_peer
