"""The launcher of a job on several hosts: it serves their store, starts an agent on each, and waits for their end.

    this process --- store of the job: the agents meet in it
        |-- ssh a --- agent on a --- its workers
        |-- ssh b --- agent on b --- its workers
        '-- agent on this machine, if it is in the list

One thread runs one loop, and the store has another thread. `core/host_health` decides which hosts take part; the agents
decide among themselves when workers start and stop. An agent leaves when its standard input ends, so nothing outlives
the launcher.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from ronde.core import host_health as health
from ronde.core.host_list import Host, describe
from ronde.core.rendezvous.membership import Failure
from ronde.core.worker_group import HASTY, TYPED, describe_interrupt
from ronde.errors import RondeError, UsageError
from ronde.job_key import JobKey
from ronde.launch.agent.failure_report import report_elsewhere
from ronde.launch.clusters.discovery import HostScript
from ronde.launch.clusters.ssh import is_here, ssh_command, travelling
from ronde.launch.config import LaunchConfig
from ronde.launch.driver.agent_process import AgentPhase, AgentProcess, Chorus
from ronde.launch.driver.assignment import LAST_WORD, Assignment, LastWord, agent_command, ended_key
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import Screen
from ronde.net.addresses import address_of_interface, address_towards, addresses_here
from ronde.net.descriptor_limit import raise_descriptor_limit
from ronde.net.stores.tcp import StoreClient, StoreServer
from ronde.process.disk import Disk
from ronde.process.error_file import ERROR_FILE, hand_up
from ronde.process.output import claim_standard_streams
from ronde.process.process_groups import SignalInbox

__all__ = ["run_hosts"]

SECOND = 10**9
FAILED, USAGE_ERROR = 1, 2
LAST_CALL_NS = SECOND  # hosts that start together arrive together; later ones need a new round
MOST_NODES = 10_000
SOMEWHERE_ELSE = "192.0.2.1"  # reserved (RFC 5737): finding the route there sends nothing
GOODBYE_NS = 15 * SECOND  # how long agents may take to end after their workers


def run_hosts(config: LaunchConfig, environment: Mapping[str, str]) -> int:
    """Run the job on the hosts of `config` and show its output; return the exit code.

    `environment`: the whole environment of the launcher. Call this in the main thread. Raises UsageError.
    """
    claim_standard_streams()
    with ExitStack() as stack:
        return _Launcher(config, environment, stack).run()


class _Launcher:
    """The shell around one `HostHealth`; what it opens belongs to the stack."""

    def __init__(self, config: LaunchConfig, environment: Mapping[str, str], stack: ExitStack) -> None:
        self._environment = environment
        self._key = JobKey.generate()
        self._hosts = tuple(Host(*host) for host in config.hosts)
        self._own_addresses = addresses_here()
        self._health = health.HostHealth(_limits(config, self._hosts))
        self._config = _for_agents(config, self._hosts)
        self._ssh, self._start_ns = config.ssh, config.start_timeout_ns
        self._agents: dict[str, AgentProcess] = {}
        self._chorus = Chorus()
        self._events: deque[health.Event] = deque()
        self._reached = False  # whether the job has had all hosts that it needs, and none refused
        self._word: LastWord | None = None  # an agent's result that ended the job
        self._reason = ""  # ... or why the launcher ended it
        # The result of the last agent that gave way.
        self._gave_way: LastWord | None = None
        self._code = 0
        self._over = False
        self._hurry = False  # a signal came after the end
        self._typed = 0  # how many times the user typed a signal
        self._stores, server = _serve_store(config, self._all_here(), self._own_addresses, self._key)
        stack.callback(server.close)
        raise_descriptor_limit()  # four for each agent
        self._store = StoreClient(server.address, self._key, 10 * SECOND)
        stack.callback(self._store.close)
        self._loop = Loop()
        stack.callback(self._loop.close)
        self._inbox = stack.enter_context(SignalInbox(config.worker.signals))
        self._screen = Screen(self._loop, lambda: self._interrupt(signal.SIGPIPE))
        stack.callback(self._screen.close)
        self._script: HostScript | None = None
        if config.discovery:
            self._script = HostScript(config.discovery, environment, self._loop, self._offered, self._say)
            stack.callback(self._script.close)
        stack.callback(self._close_agents)

    def run(self) -> int:
        """Run the job to its end, report, and return the exit code."""
        self._loop.watch(self._inbox.fileno(), Order.SIGNALS, self._read_signals)
        self._beat()
        if self._script:
            self._script.ask_for_hosts()
            self._offered(())  # starts the timeout for hosts, even if the script never answers
        else:
            self._offered(self._hosts)
        while self._agents or not self._over:
            self._turn()
        self._report()
        while self._screen.waiting and not self._hurry:
            self._turn()
        return self._code

    def _turn(self) -> None:
        self._screen.balance()
        for agent in self._agents.values():
            agent.balance()
        self._loop.turn()

    def _all_here(self) -> bool:
        return bool(self._hosts) and all(self._is_here(host.name) for host in self._hosts)

    def _is_here(self, name: str) -> bool:
        return is_here(name, self._own_addresses)

    def _beat(self) -> None:
        for agent in list(self._agents.values()):
            agent.send_heartbeat()
        next_ns = time.monotonic_ns() + self._config.rendezvous.heartbeat_ns
        self._loop.set_timer(self._beat, next_ns, self._beat)

    # What happens

    def _read_signals(self) -> None:
        for signum in self._inbox.read():
            self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        self._hurry = self._over and not self._agents
        self._typed += signum in TYPED
        if not self._reason and not self._word:
            self._end_job(describe_interrupt(signum), 128 + signum, signum)
        else:
            for agent in list(self._agents.values()):
                agent.send_signal(signum) if self._typed < 3 else agent.kill()

    def _offered(self, hosts: tuple[Host, ...]) -> None:
        self._step_health(health.Offered(hosts))

    def _step_health(self, event: health.Event) -> None:
        """Step the machine by one event after the other, including those that arise while it performs effects."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            self._perform_effects(self._health.step(time.monotonic_ns(), self._events[0]))
            self._events.popleft()

    def _perform_effects(self, effects: list[health.Effect]) -> None:
        for effect in effects:
            match effect:
                case health.Start(host):
                    self._start(host)
                case health.StopHost(name, reason):
                    self._say(reason)
                    self._agents[name].ask_to_leave()
                case health.HostNotice(text):
                    self._say(text)
                case health.SetHostTimer(at_ns):
                    self._loop.set_timer(self._health, at_ns, lambda: self._step_health(health.HostTimer()))
                case health.GiveUp(reason) if self._gave_way:
                    self._say(reason)
                    self._word = self._gave_way
                    self._end_job("", self._word.exit_code, signal.SIGTERM)
                case health.GiveUp(reason):
                    if self._script and self._script.trouble:
                        reason = f"{reason}; {self._script.trouble}"
                    self._end_job(reason, FAILED if self._reached else USAGE_ERROR, signal.SIGTERM)

    # Agents

    def _start(self, host: Host) -> None:
        here = self._is_here(host.name)
        listed = [name for name, _ in self._hosts]
        config = replace(
            self._config,
            worker=replace(
                self._config.worker,
                slots=host.slots,
                environment={**self._config.worker.environment, "HOROVOD_HOSTNAME": host.name},
            ),
            # The order of the list is that of the ranks.
            rendezvous=replace(
                self._config.rendezvous, node_rank=listed.index(host.name) if host.name in listed else -1
            ),
        )
        assignment = Assignment(
            agent=secrets.token_hex(8),
            job_key=self._key.hex(),
            stores=self._stores,
            directory=os.getcwd(),
            environment={} if here else travelling(self._environment),
            config=config,
        )
        connect_s = max(1, self._start_ns // SECOND)
        argv = agent_command()
        if not here:
            argv = ssh_command(host.name, self._ssh, config, self._environment, connect_s)
        try:
            agent = AgentProcess(
                host.name,
                assignment,
                argv,
                self._environment,
                self._loop,
                self._screen,
                self._chorus,
                self._began,
                self._ended,
                by_ssh=not here,
            )
        except OSError as error:
            return self._step_health(
                health.HostFailed(host.name, f"cannot start {argv[0]}: {error.strerror}")
            )
        self._agents[host.name] = agent
        at_ns = time.monotonic_ns() + self._start_ns
        return self._loop.set_timer(agent, at_ns, lambda: self._too_late(agent))

    def _began(self, agent: AgentProcess) -> None:
        self._loop.set_timer(agent, None, lambda: None)
        there = {name for name, agent in self._agents.items() if agent.phase is AgentPhase.RUNNING}
        slots = sum(host.slots for host in self._health.running() if host.name in there)
        self._reached = self._reached or slots >= self._health.limits.min_slots

    def _too_late(self, agent: AgentProcess) -> None:
        agent.kill(f"did not answer within {self._start_ns / SECOND:g} s")

    def _ended(self, agent: AgentProcess) -> None:
        self._loop.set_timer(agent, None, lambda: None)
        del self._agents[agent.name]
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
                self._reached = False  # the configuration is at fault, not the host
            self._step_health(health.HostFailed(agent.name, word.reason if word else agent.why))
        elif word.gave_way and any(host.name != agent.name for host in self._health.running()):
            self._gave_way = word
            self._step_health(health.HostFailed(agent.name, word.reason))
        else:
            self._word, self._code = word, word.exit_code
            self._finish_job(farewell=True)  # a worker on another host may still end after its exception

    def _last_word(self, agent: AgentProcess) -> LastWord | None:
        try:
            return LAST_WORD.decode(self._store.get(ended_key(agent.id), 0))
        except RondeError:
            return None

    def _close_agents(self) -> None:
        for agent in self._agents.values():
            agent.close()

    # The end

    def _end_job(self, reason: str, code: int, signum: int) -> None:
        """End the job on all hosts."""
        self._reason, self._code = reason, code
        for agent in list(self._agents.values()):
            agent.send_signal(signum)
        self._finish_job(farewell=signum not in HASTY)

    def _finish_job(self, farewell: bool = False) -> None:
        """Note the job's end, and give the remaining agents time to learn of it and end."""
        self._over = True
        self._step_health(health.JobOver())
        if self._script:
            self._script.close()
            self._script = None
        for agent in self._agents.values():
            if agent.phase is AgentPhase.WAITING:
                agent.kill()
        spec = self._config.worker
        wait_ns = spec.longest_end_ns(farewell) + GOODBYE_NS
        self._loop.set_timer(self, time.monotonic_ns() + wait_ns, self._hang_up)

    def _hang_up(self) -> None:
        for agent in list(self._agents.values()):
            agent.kill("did not end")

    def _say(self, text: str) -> None:
        self._screen.say(f"ronde: {text}".encode(errors="backslashreplace"))

    def _report(self) -> None:
        """Show why the job failed: the first failure, on any host, and at the end the last output of its worker."""
        if self._code:
            failure = self._word.failure if self._word else None
            if failure is not None and (path := self._environment.get(ERROR_FILE)):
                try:
                    Disk().ask(lambda: hand_up(path, failure))
                except OSError as error:
                    self._say(f"cannot write the error file {path}: {error.strerror or error}")
            reason = self._reason or (self._word.reason if self._word else "")
            for line in report_elsewhere(reason, failure):
                self._screen.say(line)


def _knows_better(failure: Failure, known: LastWord | None) -> bool:
    """Return whether an agent's later result names the cause of a failure where the known one blames a lost peer."""
    if known is None or known.failure is None:
        return True
    return known.failure.blames_peer and not failure.blames_peer


def _is_fixed(config: LaunchConfig, hosts: tuple[Host, ...]) -> bool:
    """Return whether the job needs all hosts all the time."""
    return not config.discovery and not 0 < config.min_workers < sum(host.slots for host in hosts)


def _limits(config: LaunchConfig, hosts: tuple[Host, ...]) -> health.Limits:
    slots = sum(host.slots for host in hosts)
    is_fixed = _is_fixed(config, hosts)
    if not config.discovery and config.min_workers > slots:
        raise UsageError(
            f"{config.min_workers} workers, the minimum, need as many slots, but {describe(hosts)} has {slots}: name "
            "more hosts or slots, or lower --min-np"
        )
    return health.Limits(
        min_slots=config.min_workers or slots or 1,
        max_slots=config.max_workers or None,
        cooldown_ns=None if is_fixed else config.cooldown_ns,
        patience_ns=config.rendezvous.join_timeout_ns,
        is_changing=config.discovery is not None,
        first_slots=config.discovery.first_workers if config.discovery else 0,
    )


def _for_agents(config: LaunchConfig, hosts: tuple[Host, ...]) -> LaunchConfig:
    """Return the configuration of all agents; each one adds its slots and addresses."""
    limits = _limits(config, hosts)
    is_fixed = _is_fixed(config, hosts)
    rendezvous = replace(
        config.rendezvous,
        backend=_backend(config, is_fixed and len(hosts) == 1),
        run_id=config.rendezvous.run_id or secrets.token_hex(8),
        min_nodes=len(hosts) if is_fixed else 1,
        min_slots=0 if is_fixed else limits.min_slots,
        max_nodes=len(hosts) if is_fixed else MOST_NODES,
        last_call_ns=LAST_CALL_NS,
        supply=len(hosts) if is_fixed else None,
        options={
            "is_host": "false",
            "rehost": "false",
            **config.rendezvous.options,
        },  # the launcher is the host
        gives_way=not is_fixed,
    )
    return replace(config, rendezvous=rendezvous, hosts=(), discovery=None)


def _backend(config: LaunchConfig, is_one_host: bool) -> str:
    if config.rendezvous.endpoint:
        return config.rendezvous.backend
    return "alone" if is_one_host else "tcp"


def _serve_store(
    config: LaunchConfig, all_here: bool, own_addresses: list[str], key: JobKey
) -> tuple[tuple[str, ...], StoreServer]:
    """Serve the job's store; return the addresses by which hosts may reach it, and the server.

    It listens on the interface that the user names, else on all, because each host may use another one.
    """
    if given := config.interface or config.local_addr:
        reachable = [address_of_interface(given)]
        server = _listen(reachable, key)
    elif all_here:
        reachable = ["127.0.0.1"]
        server = _listen(reachable, key)
    else:
        likely = _towards_others(config, own_addresses)
        reachable = list(dict.fromkeys([*likely, *own_addresses]))
        server = _listen(["::", "0.0.0.0"], key)
    if not reachable:
        server.close()
        raise UsageError("this machine has no network interface by which other hosts could reach it")
    port = server.address.rpartition(":")[2]
    return tuple(_tcp(address, port) for address in reachable), server


def _towards_others(config: LaunchConfig, own_addresses: list[str]) -> list[str]:
    """Return the address by which other hosts probably reach this one, if there is one."""
    others = [name.rpartition("@")[2] for name, _ in config.hosts if not is_here(name, own_addresses)]
    for name in (*others[:1], SOMEWHERE_ELSE):  # only ssh may know the name
        with contextlib.suppress(UsageError):
            return [address_towards(name, config.start_timeout_ns)]
    return []


def _listen(addresses: list[str], key: JobKey) -> StoreServer:
    *others, last = addresses
    for address in others:
        try:
            return StoreServer(_tcp(address, "0"), key)
        except UsageError:  # this machine has no IPv6
            continue
    return StoreServer(_tcp(last, "0"), key)


def _tcp(host: str, port: str) -> str:
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
