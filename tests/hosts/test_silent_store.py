"""The host with the rendezvous' store says nothing any more: who goes on elsewhere, who may not, and who comes back."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from tests.hosts.ssh_jobs import RunningJob, wait_for

from ronde.settings import JobKey
from ronde.testing.hosts import Hosts

pytestmark = pytest.mark.quiet  # a silence of three seconds is a death

PORT = 29_400
IN = ("unshare", "--uts", "sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh")
# A silence of three seconds is a death, and who comes late is let in after a moment.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=0.3"

SCRIPT = """
import os, socket, time
beats = open(f"round-{int(os.environ['RONDE_ROUND'])}.{socket.gethostname()}", "w")
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {socket.gethostname()}", flush=True)
while not os.path.exists("done"):
    print(time.monotonic_ns(), file=beats, flush=True)  # all hosts of the test have one clock
    time.sleep(0.02)
"""

# The same with workers that go on in place, and show that they work after each commit.
IN_PLACE = """
import os, socket, time
import ronde, ronde.elastic

@ronde.elastic.run
def train(state):
    beats = open(f"round-{int(os.environ['RONDE_ROUND'])}.{socket.gethostname()}", "w")
    print(f"rank {ronde.rank()} of {ronde.size()} on {socket.gethostname()} in {os.getpid()}", flush=True)
    while not state.is_done:
        state.is_done = bool(ronde.allreduce(float(os.path.exists("done")), op=ronde.Max))
        state.commit()
        print(time.monotonic_ns(), file=beats, flush=True)
        time.sleep(0.02)

train(ronde.elastic.ObjectState(is_done=False))
"""


class World:
    """Hosts with an agent each; the first one serves the store."""

    def __init__(self, hosts: Hosts, stack: ExitStack, folder: Path) -> None:
        self.hosts = hosts
        self.stack = stack
        self.folder = folder
        self.agents: dict[int, RunningJob] = {}
        self.heard: dict[int, int] = {}  # how much of their output
        self.environ = {**os.environ, "RONDE_JOB_KEY": JobKey.generate().hex(), "PYTHONUNBUFFERED": "1"}
        (folder / "script.py").write_text(SCRIPT)

    def start(self, host: int, nodes: str) -> RunningJob:
        command = [*self.hosts.command(host), *IN, f"host-{host}", sys.executable, "-m", "ronde", "run"]
        command += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-conf", QUICK]
        command += ["--rdzv-endpoint", f"{self.hosts.ipv4(0)}:{PORT}", "script.py"]
        self.agents[host] = self.stack.enter_context(RunningJob(command, self.environ, self.folder))
        return self.agents[host]

    def works(self, *hosts: int) -> None:
        """Wait until the workers of these hosts, and of no others, are in a world; what they said before is old."""
        for host in hosts:
            agent, old = self.agents[host], self.heard.get(host, 0)
            text = f"of {len(hosts)} on host-{host}"
            wait_for(lambda: text in agent.out()[old:] or agent.process.poll() is not None)  # noqa: B023
            assert text in agent.out()[old:], agent.err()
            self.heard[host] = len(agent.out())

    def part(self, *sides: tuple[int, ...], how: str = "block") -> None:
        """Nothing that one side sends reaches another."""
        for side in sides:
            for sender in side:
                for receiver in (host for other in sides if other != side for host in other):
                    getattr(self.hosts, how)(sender, receiver)

    def rounds(self) -> dict[int, tuple[int, int]]:
        """For each round, when a worker of it has first shown that it works, and when last, in nanoseconds."""
        shown: dict[int, list[int]] = {}
        for path in self.folder.glob("round-*"):
            number = int(path.stem.removeprefix("round-"))
            shown.setdefault(number, []).extend(map(int, path.read_text().split()))
        return {number: (min(times), max(times)) for number, times in sorted(shown.items()) if times}

    def has_no_overlaps(self) -> None:
        """Check, when a second round works, that each round had ended its work before the next one began."""
        wait_for(lambda: len(self.rounds()) > 1)
        rounds = list(self.rounds().values())
        overlaps_ns = [ended_ns - began_ns for (_, ended_ns), (began_ns, _) in pairwise(rounds)]
        assert max(overlaps_ns) < 0, f"one round was still at work when the next had begun: {overlaps_ns} ns"

    def processes(self, host: int) -> set[str]:
        """Return the processes that have been workers of this host."""
        return set(re.findall(r" in (\d+)", self.agents[host].out()))

    def done(self) -> None:
        """Let the workers succeed."""
        (self.folder / "done").touch()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Hosts(4) as hosts, ExitStack() as stack:
        yield World(hosts, stack, tmp_path)


def test_most_nodes_go_on_without_the_store_and_its_host_takes_nobody_back(world: World) -> None:
    """The workers train by ronde.elastic: those beside the store commit nothing more, and the others live on."""
    (world.folder / "script.py").write_text(IN_PLACE)
    for host in range(3):
        world.start(host, "1:4")
    world.works(0, 1, 2)
    wait_for(lambda: len(world.rounds()) > 0)
    world.part((0, 3), (1, 2))
    newcomer = world.start(3, "1:4")  # it finds the store, and its host, but that is not the job any more
    world.works(1, 2)
    cut = world.agents[0]
    wait_for(lambda: "one more node of the last round must be here" in cut.err())
    time.sleep(1)  # its last call
    assert (newcomer.out(), len(cut.out())) == ("", world.heard[0])
    world.has_no_overlaps()
    assert [len(world.processes(host)) for host in (1, 2)] == [1, 1], world.agents[1].err()
    world.part((0, 3), (1, 2), how="unblock")
    world.works(0, 1, 2, 3)
    for agent in (cut, newcomer):
        assert f"the job goes on at tcp:{world.hosts.ipv4(1)}:" in agent.err()
    world.done()
    for agent in world.agents.values():
        code, _, err = agent.end()
        assert code == 0, err


@pytest.mark.parametrize(
    ("cut", "script"),
    [((0,), SCRIPT), ((2,), IN_PLACE)],
    ids=["the host with the store", "another host, in place"],
)
def test_no_two_rounds_work_at_the_same_time(world: World, cut: tuple[int, ...], script: str) -> None:
    """Of three hosts one is cut off. The two others go on, but only when the workers there have certainly ended."""
    (world.folder / "script.py").write_text(script)
    for host in range(3):
        world.start(host, "1:3")
    world.works(0, 1, 2)
    wait_for(lambda: len(world.rounds()) > 0)
    left = tuple(host for host in range(3) if host not in cut)
    world.part(cut, left)
    world.works(*left)
    world.has_no_overlaps()
    world.part(cut, left, how="unblock")
    world.works(0, 1, 2)
    world.done()
    for agent in world.agents.values():
        assert agent.end()[0] == 0, agent.err()
    if script is IN_PLACE:
        assert [len(world.processes(host)) for host in range(3)] == [1, 1, 2], world.agents[1].err()
