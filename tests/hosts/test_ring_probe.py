"""The ring probe between hosts that reach each other by some of their interfaces only."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from tests.conformance.altering_relay import AlteringRelay
from tests.hosts import ssh
from tests.hosts.ssh_jobs import World

from ronde.errors import RondeError
from ronde.launch.clusters import local
from ronde.launch.clusters.cluster import Capabilities, SlotEvents, Ticket
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions
from ronde.settings import JobKey
from ronde.stores.server import StoreServer
from ronde.testing.hosts import SWITCH, Hosts

DIRECT = ("10.77.0.1", "10.77.0.2")  # of the link between the hosts, `direct`
EVERYWHERE = "172.17.0.1"  # of a bridge that both hosts have, as those of containers do

AGENT = """
import os, sys
from ronde.launch.driver.ring import RingPlan
from ronde.errors import UsageError
from ronde.launch.driver.ring_probe import probe_ring
from ronde.stores.tcp import StoreClient
from ronde.settings import JobKey

address, timeout_s, host, probes, *interfaces = sys.argv[1:]
key = JobKey.from_hex(os.environ["RONDE_JOB_KEY"])
plan = RingPlan(int(host), 1 - int(host), probes == "first", tuple(interfaces))
store = StoreClient(address, key, 10 * 10**9)
try:
    print(probe_ring(store, key, plan, int(timeout_s) * 10**9))
except UsageError as error:
    print(error)
"""


@dataclass
class Pair:
    """Two hosts on a switch, with a link between them."""

    hosts: Hosts

    def ip(self, host: int, command: str) -> None:
        subprocess.run([*self.hosts.command(host), "ip", *command.split()], check=True)

    def add_link(self) -> None:
        """Connect the hosts directly, too."""
        self.ip(0, f"link add direct type veth peer name direct netns {self.hosts.command(1)[-1]}")
        for host, address in enumerate(DIRECT):
            self.ip(host, f"address add {address}/24 dev direct")
            self.ip(host, "link set direct up")

    def cut_switch(self) -> None:
        """Lose frames between the hosts that take the way by the switch."""
        self.hosts.block(0, 1)
        self.hosts.block(1, 0)

    def probe(
        self, *interfaces: str, by: str = "", ipv6: bool = False, timeout_s: int = 30
    ) -> tuple[str, str, str]:
        """The results of an agent on host 0 and two on host 1; `by`: the store's address, if not of the switch."""
        key = JobKey.generate()
        with ExitStack() as stack:
            host = "127.0.0.1" if by else self.hosts.ipv6(SWITCH) if ipv6 else self.hosts.ipv4(SWITCH)
            server = StoreServer(f"tcp:[{host}]:0" if ipv6 else f"tcp:{host}:0", key)
            stack.callback(server.close)
            address, port = server.address, int(server.address.rpartition(":")[2])
            if by:
                relay = AlteringRelay(lambda: (host, port), lambda _side, _number, data: data, at=(by, port))
                stack.callback(relay.close)
                address = f"tcp:{by}:{port}"
            command = (sys.executable, "-c", AGENT, address, str(timeout_s))
            agents = [
                subprocess.Popen(
                    [*self.hosts.command(at), *command, str(at), which, *interfaces],
                    env={**os.environ, "RONDE_JOB_KEY": key.hex()},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for at, which in ((0, "first"), (1, "first"), (1, "second"))
            ]
            zero, one, other = (agent.communicate(timeout=60)[0].strip() for agent in agents)
            return zero, one, other


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Hosts(2) as hosts:
        yield Pair(hosts)


def test_an_address_counts_that_the_other_host_reaches(pair: Pair) -> None:
    zero, one = pair.hosts.ipv4(0), pair.hosts.ipv4(1)
    assert pair.probe() == (zero, one, one)
    for host in (0, 1):  # the likeliest that answers is still that of the switch
        pair.ip(host, "link add docker0 type bridge")
        pair.ip(host, f"address add {EVERYWHERE}/16 dev docker0")
        pair.ip(host, "link set docker0 up")
    assert pair.probe() == (zero, one, one)
    assert pair.probe(by=pair.hosts.ipv4(SWITCH)) == (zero, one, one)  # the driver is behind a relay

    pair.cut_switch()
    pair.add_link()
    assert pair.probe() == (DIRECT[0], DIRECT[1], DIRECT[1])
    assert pair.probe("direct") == (DIRECT[0], DIRECT[1], DIRECT[1])

    failures = pair.probe("eth0", "docker0")
    for failure, address in zip(failures, (one, zero, one)):
        assert f" cannot reach {os.uname().nodename}: {address} (eth0): no answer within 5 s; " in failure
        assert f"; {EVERYWHERE} (docker0): connection refused; " in failure
    zero_says, _, other_says = pair.probe("eth7", timeout_s=1)
    assert " has no address on eth7 by which other hosts could reach it" in zero_says
    assert " waited 1 s for another host to find out its address" in other_says


def test_hosts_with_ipv6_only(pair: Pair) -> None:
    for host in (0, 1):
        pair.ip(host, "-4 address flush dev eth0")
    zero, one = pair.hosts.ipv6(0), pair.hosts.ipv6(1)
    assert pair.probe(ipv6=True) == (zero, one, one)


@pytest.mark.skipif(bool(ssh.require()), reason=ssh.require())
def test_ranks_of_a_job_by_ssh_use_the_interface_that_connects_their_hosts(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with ssh.SshServers(pair.hosts) as servers:
        world = World(pair.hosts, servers, tmp_path_factory.mktemp("job"))
        pair.cut_switch()
        code, out, err = world.run("-H", world.listed(0, 1), str(world.program), "reduce")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert " cannot reach host-" in err
        pair.add_link()
        code, out, err = world.run("-H", world.listed(0, 1), str(world.program), "reduce")
    assert (code, err) == (0, "")
    assert out.count("sum 2") == 2


class HostsCluster:
    """A cluster with any number of slots on two hosts, by turns."""

    name = "these hosts"
    capabilities = Capabilities(elastic=False, gang=False)

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._tasks: list[subprocess.Popen[bytes]] = []

    def capacity(self) -> None:
        return None

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        for ticket in tickets:
            command = [*self._hosts.command(ticket.slot % 2), sys.executable, "-P", "-m", local.__name__]
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            task = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE)
            assert task.stdin is not None
            task.stdin.write(pickle.dumps(ticket))
            task.stdin.close()
            self._tasks.append(task)

    def cancel(self, reason: str) -> None:
        for task in self._tasks:
            task.kill()
            task.wait()


def place() -> tuple[int, ...]:
    import numpy

    import ronde

    ronde.init()
    named = tuple(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    seen = (ronde.rank(), ronde.local_rank(), ronde.local_size(), ronde.cross_rank())
    assert named == seen
    return *seen, int(ronde.allreduce(numpy.ones(1), op=ronde.Sum)[0])


def test_tasks_of_a_cluster_have_ranks_by_host_and_use_the_interface_that_connects_their_hosts(
    pair: Pair,
) -> None:
    pair.cut_switch()
    out, err = io.StringIO(), io.StringIO()
    options = RunOptions(4, stdout=out, stderr=err, start_timeout=30)
    with pytest.raises(RondeError, match=r" cannot reach .*no answer within 5 s"):
        run_function(HostsCluster(pair.hosts), place, (), {}, options)
    pair.add_link()
    named = replace(options, nics="direct,eth7")  # the driver has neither
    results = run_function(HostsCluster(pair.hosts), place, (), {}, named)
    assert results == [(0, 0, 2, 0, 4), (1, 1, 2, 0, 4), (2, 0, 2, 1, 4), (3, 1, 2, 1, 4)]
