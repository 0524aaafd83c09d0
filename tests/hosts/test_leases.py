"""No two rounds of a job work at the same time, wherever the nodes meet; and nobody waits without need."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from tests.hosts import ssh
from tests.hosts.ssh_jobs import AGENT, RunningJob, make_world, wait_for
from tests.hosts.ssh_jobs import World as SshWorld
from tests.hosts.test_silent_store import IN, PORT
from tests.hosts.test_ssh_links import discovery

from ronde.settings import JobKey
from ronde.testing.hosts import Hosts

pytestmark = pytest.mark.quiet  # a silence of three seconds is a death

QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=0.3"
# A test that had to wait until a lease has run out would not end in time.
SLOW = "keep_alive_interval=60,keep_alive_max_attempt=3,last_call_timeout=0.3"

# Shows that it works, in a file for each round and host. After SIGTERM it goes on for as long as "saves.HOST" says.
SCRIPT = """
import os, signal, socket, sys, time
host = socket.gethostname()
ends = [float("inf")]

def save(*_):
    if ends[0] == float("inf"):
        ends[0] = time.monotonic() + (float(open(f"saves.{host}").read()) if os.path.exists(f"saves.{host}") else 0)

signal.signal(signal.SIGTERM, save)
beats = open(f"round-{int(os.environ['RONDE_ROUND'])}.{host}", "w")
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {host}", flush=True)
while not os.path.exists("done") and time.monotonic() < ends[0]:
    print(time.monotonic_ns(), file=beats, flush=True)  # all hosts of the test have one clock
    time.sleep(0.02)
print(f"{host} has saved" if ends[0] < float("inf") else "", flush=True)
sys.exit(0)
"""


class Nodes:
    """Hosts that share a folder, with an agent each that the test has started."""

    def __init__(self, hosts: Hosts, stack: ExitStack, folder: Path) -> None:
        self.hosts, self.stack, self.folder = hosts, stack, folder
        self.agents: list[RunningJob] = []
        self.environ = {**os.environ, "RONDE_JOB_KEY": JobKey.generate().hex(), "PYTHONUNBUFFERED": "1"}
        (folder / "script.py").write_text(SCRIPT)

    def start(self, backend: str, conf: str) -> None:
        """Start an agent on each host, the first one first, and wait for their round."""
        endpoint = str(self.folder / "meeting") if backend == "file" else f"{self.hosts.ipv4(0)}:{PORT}"
        count = self.hosts.count
        for host in range(count):
            words = ["--nnodes", f"1:{count}", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
            words += ["--rdzv-conf", conf, "--rdzv-id", "job", "--local-addr", self.hosts.ipv4(host)]
            command = [*self.hosts.command(host), *IN, f"host-{host}", sys.executable, "-m", "ronde", "run"]
            job = RunningJob([*command, *words, "script.py"], self.environ, self.folder)
            self.agents.append(self.stack.enter_context(job))
        self.work(*range(count))

    def work(self, *hosts: int) -> None:
        """Wait until the workers of these hosts are in a world without others."""
        for host in hosts:
            self.agents[host].says(f"of {len(hosts)} on host-{host}")

    def end(self, *hosts: int) -> None:
        (self.folder / "done").touch()
        for host in hosts:
            assert self.agents[host].end()[0] == 0, self.agents[host].err()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Hosts(3) as hosts, ExitStack() as stack:
        yield Nodes(hosts, stack, tmp_path)


def overlaps_ns(folder: Path) -> list[int]:
    """For how long each round was still at work when a worker of the next had begun; less than 0 if it was not."""
    shown: dict[int, list[int]] = {}
    for path in folder.glob("round-*"):
        number = int(path.stem.removeprefix("round-"))
        shown.setdefault(number, []).extend(map(int, path.read_text().split()))
    rounds = [(min(times), max(times)) for _, times in sorted(shown.items()) if times]
    assert len(rounds) > 1
    return [ended_ns - began_ns for (_, ended_ns), (began_ns, _) in pairwise(rounds)]


def save_for(folder: Path, host: int, seconds: float) -> None:
    """Let the workers of that host go on for a while when they are to end."""
    (folder / f"saves.host-{host}").write_text(f"{seconds}")


def test_a_host_that_is_cut_off_where_nodes_meet_at_one_place_only(nodes: Nodes) -> None:
    nodes.start("c10d", f"{QUICK},rehost=false")
    save_for(nodes.folder, 2, 60)
    for host in (0, 1):
        nodes.hosts.block(2, host)
        nodes.hosts.block(host, 2)
    nodes.work(0, 1)
    assert max(overlaps_ns(nodes.folder)) < 0
    nodes.end(0, 1)


def test_a_host_that_cannot_write_the_file_where_nodes_meet(nodes: Nodes) -> None:
    """As after it has lost the file server: its agent ends, but its workers would save for a long time."""
    nodes.start("file", QUICK)
    save_for(nodes.folder, 2, 60)
    resource.prlimit(nodes.agents[2].process.pid, resource.RLIMIT_FSIZE, (0, 0))
    nodes.work(0, 1)
    assert max(overlaps_ns(nodes.folder)) < 0
    nodes.end(0, 1)


@pytest.mark.parametrize("backend", ["c10d", "file"])
def test_the_others_wait_for_the_workers_of_a_node_that_leaves(nodes: Nodes, backend: str) -> None:
    """A scheduler takes the node away, and its workers have 30 s to save what they have."""
    nodes.start(backend, QUICK)
    save_for(nodes.folder, 2, 8)
    nodes.agents[2].process.send_signal(signal.SIGTERM)
    nodes.work(0, 1)
    assert max(overlaps_ns(nodes.folder)) < 0
    assert "host-2 has saved" in nodes.agents[2].out()
    nodes.end(0, 1)


@pytest.mark.parametrize(("backend", "conf"), [("c10d", ""), ("c10d", ",rehost=false"), ("file", "")])
def test_nobody_waits_for_a_lease_when_an_agent_is_killed(nodes: Nodes, backend: str, conf: str) -> None:
    nodes.start(backend, SLOW + conf)
    nodes.agents[2].process.kill()
    nodes.work(0, 1)
    assert max(overlaps_ns(nodes.folder)) < 0
    nodes.end(0, 1)


# Hosts whose agents are started by ssh


@pytest.fixture
def world() -> Iterator[SshWorld]:
    if reason := ssh.require():
        pytest.skip(reason)
    with make_world(3) as world:
        world.program.write_text(SCRIPT)
        yield world
        wait_for(world.is_empty)


def run(world: SshWorld, conf: str) -> RunningJob:
    words = ("--rdzv-conf", conf, *discovery(world, 0, 1, 2), "--min-np", "2")
    return world.start(*words, str(world.program))


def test_a_host_that_is_cut_off_from_the_launcher(world: SshWorld) -> None:
    with run(world, QUICK) as job:
        job.says("of 3", 3)
        save_for(world.folder, 2, 60)
        world.hosts.disconnect(2)
        job.says("of 2", 2)
        assert max(overlaps_ns(world.folder)) < 0
        wait_for(lambda: not world.processes(2))
        (world.folder / "done").touch()
        assert job.end()[0] == 0


def test_nobody_waits_for_a_lease_when_an_agent_of_the_launcher_is_killed(world: SshWorld) -> None:
    with run(world, SLOW) as job:
        job.says("of 3", 3)
        assert any(AGENT in command for command in world.processes(2).values())
        world.signal_agent(2)
        job.says("of 2", 2)
        assert max(overlaps_ns(world.folder)) < 0
        (world.folder / "done").touch()
        assert job.end()[0] == 0
