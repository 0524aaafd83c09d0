"""Agents on hosts that ssh reaches, and on this machine: those of a list, or those that a script finds.

this process --- store of the job: the agents meet in it
    |-- ssh a --- agent on a --- its workers
    |-- ssh b --- agent on b --- its workers
    '-- agent on this machine, if it is in the list
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.config import LaunchConfig
from ronde.launch.driver import host_health as health
from ronde.launch.driver.agent_process import SSH, AgentProcess, ChildStreams
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.driver_messages import Assignment, agent_command
from ronde.launch.driver.job_store import offer_call, open_store, reachable_addresses
from ronde.launch.driver.ring import RingPlan, plan_ring
from ronde.launch.hosts.discovery import HostScript
from ronde.launch.hosts.host_list import Host, describe
from ronde.launch.hosts.ssh import is_here, ssh_command, travelling
from ronde.launch.screen import claim_standard_streams
from ronde.net.addresses import addresses_here

__all__ = ["HostAgents", "run_hosts"]

SECOND = 10**9
LAST_CALL_NS = SECOND  # hosts that start together arrive together; later ones need a new round
MOST_NODES = 10_000


def run_hosts(config: LaunchConfig, environment: Mapping[str, str]) -> int:
    """Run the job on the hosts of `config` and show its output; return the exit code.

    `environment`: the whole environment of the launcher. Call this in the main thread. Raises UsageError.
    """
    claim_standard_streams()
    with ExitStack() as stack:
        placement = HostAgents(config, environment)
        driver = Driver(placement, environment, stack)
        end = driver.run()
        driver.report(end)
        return end.exit_code


class HostAgents:
    """The placement of a job on the hosts of `config`. `call`: the packed function for the workers, if any."""

    is_given_by_user = True

    def __init__(self, config: LaunchConfig, environment: Mapping[str, str], call: bytes = b"") -> None:
        self._environment, self._call = environment, call
        self._hosts = tuple(Host(*host) for host in config.hosts)
        self._own_addresses = addresses_here()
        self._discovery, self._ssh = config.discovery, config.ssh
        self._start_ns = config.start_timeout_ns
        self._is_fixed = _is_fixed(config, self._hosts)
        self.limits = _limits(config, self._hosts, self._is_fixed)
        self.config = _for_agents(config, self._hosts, self._is_fixed, self.limits.min_slots)
        self._key = JobKey.generate()
        self._stack = ExitStack()
        self._script: HostScript | None = None
        self._waiting: dict[str, Assignment] = {}  # by host, until the agent's hello
        self._rings: dict[str, RingPlan | None] = {}  # by host
        self._numbers = {
            host.name: number for number, host in enumerate(self._hosts)
        }  # in the order of ranks

    def open(self, driver: Driver) -> None:
        """Serve the store, and offer the hosts, or ask the script for them."""
        self._driver = driver
        names = [host.name for host in self._hosts]
        if names and all(map(self._is_here, names)) and not self._is_placed():
            reachable: Sequence[str] = ["127.0.0.1"]
            listening = reachable
        else:
            if self._is_fixed and not self._is_placed():
                self._rings = dict(zip(names, plan_ring(names)))
            reachable, listening = reachable_addresses(self.config, self._own_addresses, names)
        self.store, self._stores = open_store(reachable, listening, self._key, self._stack)
        if self._call:
            offer_call(self.store, self._call)
        if self._discovery:
            self._script = HostScript(
                self._discovery, self._environment, driver.loop, driver.offer_hosts, driver.say
            )
            self._script.ask_for_hosts()
            driver.offer_hosts(())  # starts the timeout for hosts, even if the script never answers
        else:
            driver.offer_hosts(self._hosts)

    def start_agents(self, hosts: Sequence[Host]) -> None:
        """Start an agent on each host, by ssh or as a child."""
        for host in hosts:
            self._numbers.setdefault(host.name, len(self._numbers))
            self._start(host)

    def greeted(self, agent: AgentProcess) -> None:
        """Give the agent its assignment."""
        self._driver.loop.set_timer(agent, None, lambda: None)
        agent.assign(self._waiting.pop(agent.name))
        self._driver.note_assigned()

    def is_replaced(self, agent: AgentProcess) -> bool:
        """Return False: `launch/driver/host_health` decides when a host is used again."""
        return False

    def explain_shortage(self, reason: str) -> str:
        """Add the script's present problem, if it has one."""
        return f"{reason}; {self._script.trouble}" if self._script and self._script.trouble else reason

    def end(self) -> None:
        """Call the script no more."""
        if self._script:
            self._script.close()
            self._script = None

    def close(self) -> None:
        """Close the store."""
        self.end()
        self._stack.close()

    def _is_here(self, name: str) -> bool:
        return is_here(name, self._own_addresses)

    def _is_placed(self) -> bool:
        """Return whether the user has chosen the address of this machine."""
        return bool(self.config.interface or self.config.local_addr)

    def _start(self, host: Host) -> None:
        here = self._is_here(host.name)
        config = self._config_of(host)
        argv = agent_command()
        if not here:
            connect_s = max(1, self._start_ns // SECOND)
            argv = ssh_command(host.name, self._ssh, config, self._environment, connect_s)
        try:
            streams = ChildStreams(argv, self._environment, way="" if here else SSH)
        except OSError as error:
            self._driver.fail_host(host.name, f"cannot start {argv[0]}: {error.strerror}")
            return
        agent = self._driver.add_agent(host.name)
        self._waiting[host.name] = Assignment(
            agent=agent.id,
            job_key=self._key.hex(),
            stores=self._stores,
            directory=os.getcwd(),
            environment={} if here else travelling(self._environment),
            has_call=bool(self._call),
            config=config,
            ring=self._rings.get(host.name),
        )
        agent.attach_streams(streams)
        at_ns = time.monotonic_ns() + self._start_ns
        self._driver.loop.set_timer(agent, at_ns, lambda: self._too_late(agent))

    def _config_of(self, host: Host) -> LaunchConfig:
        config = self.config
        worker = replace(
            config.worker,
            slots=host.slots,
            environment={**config.worker.environment, "HOROVOD_HOSTNAME": host.name},
        )
        rendezvous = replace(config.rendezvous, node_rank=self._numbers[host.name])
        return replace(config, worker=worker, rendezvous=rendezvous)

    def _too_late(self, agent: AgentProcess) -> None:
        agent.kill(f"did not answer within {self._start_ns / SECOND:g} s")


def _is_fixed(config: LaunchConfig, hosts: tuple[Host, ...]) -> bool:
    """Return whether the job needs all hosts all the time."""
    return not config.discovery and not 0 < config.min_workers < sum(host.slots for host in hosts)


def _limits(config: LaunchConfig, hosts: tuple[Host, ...], is_fixed: bool) -> health.Limits:
    slots = sum(host.slots for host in hosts)
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


def _for_agents(
    config: LaunchConfig, hosts: tuple[Host, ...], is_fixed: bool, min_slots: int
) -> LaunchConfig:
    """Return the configuration of all agents; each one adds its slots and addresses."""
    rendezvous = replace(
        config.rendezvous,
        backend=_backend(config, is_fixed and len(hosts) == 1),
        run_id=config.rendezvous.run_id or secrets.token_hex(8),
        min_nodes=len(hosts) if is_fixed else 1,
        min_slots=0 if is_fixed else min_slots,
        max_nodes=len(hosts) if is_fixed else MOST_NODES,
        last_call_ns=LAST_CALL_NS,
        # A short limit for the time after a loss does not shorten the start.
        first_join_timeout_ns=max(config.rendezvous.join_timeout_ns, config.start_timeout_ns),
        supply=len(hosts) if is_fixed else None,
        # The launcher is the host.
        options={"is_host": "false", "rehost": "false", **config.rendezvous.options},
        gives_way=not is_fixed,
    )
    return replace(config, rendezvous=rendezvous, hosts=(), discovery=None)


def _backend(config: LaunchConfig, is_one_host: bool) -> str:
    if config.rendezvous.endpoint:
        return config.rendezvous.backend
    return "alone" if is_one_host else "tcp"
