"""Training in place on hosts that ssh reaches: workers keep their processes when others are lost, leave or come."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.hosts import ssh
from tests.hosts.ssh_jobs import RunningJob, World, make_world, wait_for
from tests.hosts.test_ssh_links import discovery, offer

pytestmark = [
    pytest.mark.skipif(bool(ssh.require()), reason=ssh.require()),
    pytest.mark.slow,
]

# Shows its place in each world, and ends when the folder has a file `done`.
PROGRAM = """
import os, signal, socket, sys, time
import numpy as np
import ronde, ronde.elastic

folder = sys.argv[1]
ronde.init()

def fail(state):
    # FOLDER/fails: a host, and how often its worker is still to fail.
    path = folder + "/fails"
    host, count = open(path).read().split() if os.path.exists(path) else ("", "0")
    if socket.gethostname() == "host-" + host and int(count) and state.step:
        with open(path + ".new", "w") as file:
            file.write(f"{host} {int(count) - 1}")
        os.rename(path + ".new", path)
        os.kill(os.getpid(), signal.SIGKILL)

@ronde.elastic.run
def train(state):
    here = f"{socket.gethostname()} {os.getpid()} rank {ronde.rank()} of {ronde.size()} at {state.step}"
    print(f"here {here} in {os.environ['RONDE_ROUND']}", flush=True)
    while not state.is_done:
        fail(state)
        done = ronde.allreduce(np.array([os.path.exists(folder + "/done")], dtype=np.int64), op=ronde.Max)
        state.step, state.is_done = state.step + 1, bool(done[0])
        state.commit()
        with open(f"{folder}/steps.{socket.gethostname()}", "a") as file:
            file.write(f"{time.monotonic_ns()} {state.step} {ronde.size()}\\n")
        time.sleep(0.01)

train(ronde.elastic.ObjectState(step=0, is_done=False))
"""


class Place(NamedTuple):
    """A worker in a world."""

    host: int
    pid: int
    rank: int
    size: int
    step: int
    round: int


def places(job: RunningJob, size: int, after: dict[int, Place] | None = None) -> dict[int, Place]:
    """Return the places of the newest world, by host, when all are in it and it has this size."""
    least = max((place.round + 1 for place in (after or {}).values()), default=0)
    found: list[dict[int, Place]] = []

    def is_complete() -> bool:
        assert job.process.poll() is None, job.err()
        text = r"here host-(\d+) (\d+) rank (\d+) of (\d+) at (\d+) in (\d+)"
        all_places = [Place(*map(int, match.groups())) for match in re.finditer(text, job.out())]
        number = max((each.round for each in all_places if each.round >= least), default=-1)
        found[:] = [{each.host: each for each in all_places if each.round == number and each.size == size}]
        return len(found[0]) == size

    wait_for(is_complete)
    return found[0]


@pytest.fixture
def world() -> Iterator[World]:
    with make_world(3) as made:
        made.program.write_text(PROGRAM)
        yield made
        wait_for(made.is_empty)


def start(world: World, *options: str) -> RunningJob:
    return world.start(
        "--prefix", "", "--heartbeat-timeout", "3", *options, str(world.program), str(world.folder)
    )


def finish(world: World, job: RunningJob) -> str:
    (world.folder / "done").touch()
    code, _, err = job.end()
    assert code == 0, err
    return err


def committed(world: World, host: int) -> list[tuple[int, int, int]]:
    """Return the time, the number and the number of ranks of each step that a worker of this host has committed."""
    lines = (world.folder / f"steps.host-{host}").read_text().splitlines()
    at_ns, step, size = zip(*([int(word) for word in line.split()] for line in lines))
    return list(zip(at_ns, step, size))


def kept(before: dict[int, Place], after: dict[int, Place], *hosts: int) -> bool:
    """Whether the workers of these hosts have kept their processes."""
    return all(before[host].pid == after[host].pid for host in hosts)


def test_a_worker_and_then_its_host_are_lost(world: World) -> None:
    """The worker gets a successor; the host that is cut off trains no more before the others go on without it."""
    options = ("-H", world.listed(0, 1, 2), "--min-np", "2", "--max-restarts", "1")
    with start(world, *options) as job:
        first = places(job, 3)
        os.kill(first[1].pid, signal.SIGKILL)
        second = places(job, 3, after=first)
        wait_for(lambda: any(world.folder.glob("steps.host-1")))
        world.hosts.disconnect(1)
        third = places(job, 2)
        wait_for(lambda: not world.processes(1))
        err = finish(world, job)
    assert kept(first, second, 0, 2), err
    assert kept(first, third, 0, 2), err
    assert second[1].pid != first[1].pid
    steps = {host: committed(world, host) for host in (0, 1, 2)}
    assert {size for _, _, size in steps[1]} == {3}
    last, begins_ns = steps[1][-1], min(at_ns for at_ns, _, size in steps[0] + steps[2] if size == 2)
    assert last[0] < begins_ns
    assert last[1] <= third[0].step + 1, "at most the commit that was under way"


def test_agents_killed_and_hosts_that_a_script_withdraws_and_adds(world: World) -> None:
    with start(world, *discovery(world, 0, 1, 2), "--min-np", "2") as job:
        first = places(job, 3)
        world.signal_agent(1)
        second = places(job, 2)
        third = places(job, 3)
        offer(world, 0, 2)
        fourth = places(job, 2, after=third)
        wait_for(lambda: not world.processes(1))
        offer(world, 0, 1, 2)
        fifth = places(job, 3, after=fourth)
        err = finish(world, job)
    for later in (second, third, fourth, fifth):
        assert kept(first, later, 0, 2), err


def test_a_failing_host_is_set_aside_for_longer_each_time(world: World) -> None:
    """As long as Horovod's range says, while the worker of the other host goes on in its process."""
    (world.folder / "fails").write_text("1 2")
    options = ("-H", world.listed(0, 1), "--min-np", "1", "--blacklist-cooldown-range", "0.5", "60")
    with start(world, *options) as job:
        wait_for(lambda: (world.folder / "fails").read_text() == "1 0")
        last = places(job, 2)
        err = finish(world, job)
    assert re.findall(r"it is set aside for (\S+) s", err) == ["0.5", "1"]
    assert len(set(re.findall(r"here host-0 (\d+)", job.last_out))) == 1
    assert last[1].host == 1
