"""A stranger's host stands between a node and the store: it reads no secret, and what it changes is not believed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.hosts.ssh_jobs import RunningJob, wait_for
from tests.hosts.test_silent_store import IN

from ronde.settings import JobKey
from ronde.testing.hosts import Hosts

PORT = 29_411
ROOT = Path(__file__).parents[2]
KNOWN = b"/inbox/"  # in what nodes ask a store
SCRIPT = """
import os, time
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
while not os.path.exists("done"):
    time.sleep(0.02)
"""


class Nodes:
    """Host 0 serves the store, host 1 finds it by way of host 2, which belongs to somebody else."""

    def __init__(self, hosts: Hosts, stack: ExitStack, folder: Path) -> None:
        self.hosts, self.stack, self.folder = hosts, stack, folder
        self.record = folder / "record"
        self.environ = {**os.environ, "RONDE_JOB_KEY": JobKey.generate().hex(), "PYTHONUNBUFFERED": "1"}
        (folder / "script.py").write_text(SCRIPT)

    def attack(self, *acts: str) -> subprocess.Popen[str]:
        words = [self.hosts.ipv4(2), str(PORT), self.hosts.ipv4(0), str(self.record), *acts]
        command = [*self.hosts.command(2), sys.executable, "-m", "tests.hosts.relay", *words]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RONDE_JOB")}
        relay = self.stack.enter_context(
            subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
        self.stack.callback(relay.kill)
        assert relay.stdout
        assert relay.stdout.readline() == "ready\n"
        return relay

    def run(self, *words: str) -> list[RunningJob]:
        """Start both nodes, and return them when they are in a round together."""
        agents = []
        for host, place in ((0, 0), (1, 2)):
            command = [
                *self.hosts.command(host),
                *IN,
                f"host-{host}",
                sys.executable,
                "-m",
                "ronde",
                "run",
                *words,
            ]
            command += [
                "--nnodes",
                "2",
                "--rdzv-backend",
                "c10d",
                "--rdzv-id",
                "job",
                "--rdzv-conf",
                "is_host=" + str(not host),
            ]
            command += ["--rdzv-endpoint", f"{self.hosts.ipv4(place)}:{PORT}", "script.py"]
            agents.append(self.stack.enter_context(RunningJob(command, self.environ, self.folder)))
        for agent in agents:
            agent.says("of 2")
        return agents

    def end(self, agents: list[RunningJob]) -> None:
        (self.folder / "done").touch()
        for agent in agents:
            assert agent.end()[0] == 0, agent.err()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Hosts(3) as hosts, ExitStack() as stack:
        yield Nodes(hosts, stack, tmp_path)


@pytest.mark.parametrize("level", ["messages", "secret"])
def test_it_reads_nothing_that_is_secret(nodes: Nodes, level: str) -> None:
    nodes.attack()
    nodes.end(nodes.run("--protection", level))
    assert (KNOWN in nodes.record.read_bytes()) is (level == "messages")


def test_what_it_changes_repeats_and_drops_does_not_end_the_job(nodes: Nodes) -> None:
    acts = ["flip", "replay", "drop", "replay", "flip"]
    relay = nodes.attack(*acts)
    agents = nodes.run()
    assert relay.stdout
    assert [relay.stdout.readline().strip() for _ in acts] == acts
    wait_for(lambda: all("of 2" in agent.out() for agent in agents))
    nodes.end(agents)
