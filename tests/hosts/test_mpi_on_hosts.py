"""MPI on a cluster of two hosts with several interfaces, of which only one connects the hosts."""

from __future__ import annotations

import io
import shutil
import subprocess

import pytest
from tests.clusters.rank_functions import computes
from tests.conftest import MARK_NAME, MARK_VALUE
from tests.hosts import ssh
from tests.hosts.alternating_hosts import AlternatingHosts, task_programs

from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions
from ronde.testing.hosts import Hosts

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here"),
]
pytest.importorskip("mpi4py", reason="mpi4py is not installed here")


def connect_directly(hosts: Hosts) -> None:
    """Give both hosts a bridge with the same address, as those of containers, and a link; cut the way by the switch."""

    def ip(host: int, command: str) -> None:
        subprocess.run([*hosts.command(host), "ip", *command.split()], check=True)

    ip(0, f"link add direct type veth peer name direct netns {hosts.command(1)[-1]}")
    for host in range(2):
        ip(host, "link add docker0 type bridge")
        ip(host, "address add 172.17.0.1/16 dev docker0")
        ip(host, "link set docker0 up")
        ip(host, f"address add 10.99.0.{host + 1}/24 dev direct")
        ip(host, "link set direct up")
    hosts.block(0, 1)


def test_each_host_has_a_daemon_and_the_ranks_take_the_probed_interface() -> None:
    if reason := ssh.require():
        pytest.skip(reason)
    with Hosts(2) as hosts, ssh.SshServers(hosts, {MARK_NAME: MARK_VALUE}) as servers:
        connect_directly(hosts)
        cluster = AlternatingHosts(4, task_programs(hosts, servers))
        options = RunOptions(4, mpi_options=(), stdout=io.StringIO(), stderr=io.StringIO())
        results = run_function(cluster, computes, (1,), {}, options)
    assert results == [(10.0, rank, rank, rank % 2, 2, "direct") for rank in range(4)]
