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
from typing import Protocol

from ronde.errors import RondeError
from ronde.launch.agent.failure_report import report_elsewhere
from ronde.launch.agent.worker_group import HASTY, TYPED, describe_interrupt
from ronde.launch.config import LaunchConfig
from ronde.launch.driver import host_health as health
from ronde.launch.driver.agent_process import AgentPhase, AgentProcess, EchoFilter
from ronde.launch.driver.driver_messages import AGENT_END_NS, JOB_END, JobEnd, ended_key
from ronde.launch.hosts.host_list import Host
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import Screen, Streams
from ronde.net.descriptors import raise_descriptor_limit
from ronde.process.disk import Disk
from ronde.process.exceptions import ERROR_FILE, hand_up
from ronde.process.signals import SignalInbox
from ronde.rendezvous.membership import Failure
from ronde.stores.tcp import StoreClient

__all__ = ["Driver", "Placement"]

SECOND = 10**9
FAILED, USAGE_ERROR = 1, 2


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
        """Return the reason why there are too few hosts, and this placement's explanation."""

    def end(self) -> None:
        """Start no more agents: the job is over, and running ones are about to end."""

    def close(self) -> None:
        """Close everything. Agents that still run are ended."""


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
        self._echo_filter = EchoFilter()
        self._events: deque[health.Event] = deque()
        self._reached = False  # whether the job has had all hosts that it needs
        self._refused = False  # whether a host has refused the configuration since then
        self._end: JobEnd | None = None
        self._is_final = False  # whether no later result of an agent explains the end better
        self._gave_way: JobEnd | None = None  # the result of the last agent that gave way
        self._skips_output = False  # a signal came after the end
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
        while self._agents or self._end is None:
            self._turn()
        return self._end

    def show_rest(self) -> None:
        """Wait until everything is shown, or a signal ends the wait."""
        while self._screen.waiting and not self._skips_output:
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
        self._skips_output = self._end is not None and not self._agents
        self._typed += signum in TYPED
        if self._end is None:
            self._end_job(JobEnd(128 + signum, describe_interrupt(signum)), signum)
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
        if self._end is None:
            self._end_job(JobEnd(exit_code, reason), signal.SIGTERM)

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
                    self._end_job(self._gave_way, signal.SIGTERM, is_final=False)
                case health.GiveUp(reason):
                    reason = self._placement.explain_shortage(reason)
                    unreached = not self._reached and self._placement.is_given_by_user
                    exit_code = USAGE_ERROR if self._refused or unreached else FAILED
                    self._end_job(JobEnd(exit_code, reason), signal.SIGTERM)

    # Agents

    def add_agent(self, name: str) -> AgentProcess:
        """Return a new agent on the host of that name, as yet without streams."""
        agent = AgentProcess(
            name, self.loop, self._screen, self._echo_filter, self._placement.greeted, self._ended
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
        end = self._end_of(agent)
        if self._end is not None:
            if end and end.failure and not self._is_final and _knows_better(end.failure, self._end):
                self._end = end
            return
        stopped = all(host.name != agent.name for host in self._health.running())
        if stopped:
            self._step_health(health.HostEnded(agent.name))
        elif end is None or (end.exit_code not in (0, FAILED) and not end.failure):
            if end and end.exit_code == USAGE_ERROR:
                self._refused = True  # the configuration is at fault, not the host
            self._step_health(health.HostFailed(agent.name, end.reason if end else agent.why))
        elif end.gave_way and any(host.name != agent.name for host in self._health.running()):
            self._gave_way = end
            self._step_health(health.HostFailed(agent.name, end.reason))
        else:
            # A worker on another host may still end after its exception.
            self._end = end
            self._finish_job(farewell=True)

    def _end_of(self, agent: AgentProcess) -> JobEnd | None:
        """Return the job's end as the agent has left it; None if it has left none."""
        try:
            return JOB_END.decode(self._placement.store.get(ended_key(agent.id), 0))
        except RondeError:
            return None

    def _close_agents(self) -> None:
        for agent in list(self._agents.values()):
            agent.close()

    # The end

    def _end_job(self, end: JobEnd, signum: int, is_final: bool = True) -> None:
        """End the job on all hosts."""
        self._end, self._is_final = end, is_final
        for agent in list(self._agents.values()):
            agent.send_signal(signum)
        self._finish_job(farewell=signum not in HASTY)

    def _finish_job(self, farewell: bool = False) -> None:
        """Start no more agents, and give the remaining ones time to learn of the job's end and end."""
        self._step_health(health.JobOver())
        self._placement.end()
        for agent in list(self._agents.values()):
            if agent.phase is not AgentPhase.RUNNING:
                agent.kill()
        spec = self._placement.config.worker
        wait_ns = spec.longest_end_ns(farewell) + AGENT_END_NS
        self.loop.set_timer(self, time.monotonic_ns() + wait_ns, self._hang_up)

    def _hang_up(self) -> None:
        for agent in list(self._agents.values()):
            agent.kill("did not end")

    def say(self, text: str) -> None:
        """Show a line of the driver."""
        self._screen.say(f"ronde: {text}".encode(errors="backslashreplace"))

    def report(self, end: JobEnd) -> None:
        """Show why the job failed: the first failure, on any host, and at the end the last output of its worker."""
        if end.exit_code:
            if end.failure is not None and (path := self._environment.get(ERROR_FILE)):
                try:
                    failure = end.failure
                    Disk().ask(lambda: hand_up(path, failure))
                except OSError as error:
                    self.say(f"cannot write the error file {path}: {error.strerror or error}")
            for line in report_elsewhere(end.reason, end.failure):
                self._screen.say(line)
        self.show_rest()


def _knows_better(failure: Failure, known: JobEnd) -> bool:
    """Return whether an agent's later result names the cause of a failure where the known one blames a lost peer."""
    if known.failure is None:
        return True
    return known.failure.blames_peer and not failure.blames_peer
