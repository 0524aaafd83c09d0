"""One agent with real workers that continue: all that they use is the channel of `process/membership_channel`."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.ranks.launcher.test_launcher import HANGING_S, Launcher

# Each worker says its place in each round. A file `finish` ends the job; `come` makes workers leave a world to which
# another is wanted, as a commit does: all of them, when one knows that.
WORKER = """\
import os, sys, threading, time
from pathlib import Path
from ronde.process.membership_channel import membership
own = membership()
number = own.number
if "RANK" not in os.environ:
    number = own.await_place().number
own.announce_continues()
lost = set()
own.on_lost(lambda message: lost.add(message.number))
while True:
    told_ns = time.monotonic_ns()
    place = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "RONDE_ROUND", "RONDE_STORE"))
    print("here", os.getpid(), told_ns, place, flush=True)
    change = Path(f"change-{number}")
    while not (lost and max(lost) >= number) and not change.exists():
        if own.change_wanted and os.path.exists("come"):
            change.touch()
        if os.path.exists("finish"):
            own.announce_completed()
            sys.exit(0)
        time.sleep(0.001)
    number = own.await_place(number).number
"""


class Place:
    """What a worker has said of its place."""

    def __init__(self, match: re.Match[str]) -> None:
        self.pid, self.told_ns, self.rank, self.size, self.round = (int(match[i]) for i in range(1, 6))
        self.store = match[6]


class Job:
    """A job of `WORKER`, with any number of agents."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.folder = launcher, launcher.folder
        (self.folder / "script.py").write_text(WORKER)
        self.lines: queue.Queue[str] = queue.Queue()
        self.agents: list[subprocess.Popen[bytes]] = []
        self.heard: list[Place] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent."""
        (self.folder / f"errors-{len(self.agents)}").touch()
        with open(self.folder / f"errors-{len(self.agents)}", "wb") as errors:
            agent = self.launcher.start(*options, "script.py", stderr=errors)
        self.agents.append(agent)
        threading.Thread(target=self._read, args=(agent,), daemon=True).start()
        return agent

    def _read(self, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            self.lines.put(line.decode())

    def await_round(self, number: int, size: int) -> dict[int, Place]:
        """Return the places of all workers of a round, by rank."""
        while True:
            found = {place.rank: place for place in self.heard if place.round == number}
            if len(found) == size:
                assert {place.size for place in found.values()} == {size}
                assert len({place.store for place in found.values()}) == 1
                return found
            self.hear()

    def hear(self) -> None:
        """Read a line of the job."""
        line = self.lines.get(timeout=HANGING_S)
        if match := re.search(r"here (\d+) (\d+) (\d+) (\d+) (\d+) (\S+)", line):
            place = Place(match)
            assert re.match(rf"\[(.*:)?{place.rank}\] ", line), "the prefix is that of the present rank"
            self.heard.append(place)

    def end(self, agent: int = 0) -> tuple[int, str]:
        """Return the exit code of an agent, and what it said on standard error."""
        code = self.agents[agent].wait(HANGING_S)
        return code, (self.folder / f"errors-{agent}").read_text()

    def finish(self) -> tuple[int, str]:
        """End the job; return the exit code of the first agent and what that said on standard error."""
        (self.folder / "finish").touch()
        return self.end()


def pids(places: dict[int, Place]) -> list[int]:
    return [place.pid for _, place in sorted(places.items())]


def test_a_job_goes_on_with_fewer_workers_and_grows_again(launcher: Launcher) -> None:
    job = Job(launcher)
    job.start("-n", "4", "--min-np", "2")
    first = job.await_round(0, 4)
    killed_ns = time.monotonic_ns()
    os.kill(first[2].pid, signal.SIGKILL)
    second = job.await_round(1, 3)
    assert pids(second) == [first[rank].pid for rank in (0, 1, 3)]
    print("ms:", [(place.told_ns - killed_ns) / 1e6 for place in second.values()])
    (job.folder / "come").touch()
    third = job.await_round(2, 4)
    assert [third[rank].pid for rank in (0, 1, 3)] == [first[rank].pid for rank in (0, 1, 3)]
    assert third[2].pid not in pids(first), "the new worker takes the place of the lost one"
    code, err = job.finish()
    assert code == 0
    assert re.search(
        rf"ronde: rank 2 \(pid {first[2].pid}\) was killed by SIGKILL after .*; "
        r"3 workers go on in place \(round 1\), 1 replacement starts\n",
        err,
    )
    assert (
        "1 more worker is ready; 3 workers go on in place (round 2), 1 from the reserve takes part\n" in err
    )


def test_without_a_smaller_minimum_a_new_worker_takes_the_place_at_once(launcher: Launcher) -> None:
    job = Job(launcher)
    job.start("-n", "3", "--max-restarts", "2")
    first = job.await_round(0, 3)
    os.kill(first[0].pid, signal.SIGKILL)
    second = job.await_round(1, 3)
    assert pids(second)[1:] == pids(first)[1:]
    os.kill(second[1].pid, signal.SIGKILL)
    third = job.await_round(2, 3)
    assert [third[rank].pid for rank in (0, 2)] == [second[rank].pid for rank in (0, 2)]
    os.kill(third[0].pid, signal.SIGKILL)
    code, err = job.end()
    assert code == 137
    assert "were ended by the launcher" in err


@pytest.mark.slow
def test_a_spare_takes_part_in_the_next_round(launcher: Launcher) -> None:
    job = Job(launcher)
    job.start("-n", "2", "--spares", "1")
    first = job.await_round(0, 2)
    time.sleep(1)
    os.kill(first[1].pid, signal.SIGKILL)
    second = job.await_round(1, 2)
    assert second[0].pid == first[0].pid
    code, err = job.finish()
    assert code == 0
    assert "1 worker goes on in place (round 1), 1 from the reserve takes part\n" in err


NOT_ELASTIC = """\
import os, signal, time
import ronde
ronde.init()
ronde.world().barrier()
if not os.path.exists("died"):
    time.sleep(1)  # the spare is ready
    if ronde.rank() == 0:
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
ronde.world().barrier()
"""


@pytest.mark.slow
def test_a_spare_of_a_program_that_does_not_continue_is_refused(launcher: Launcher) -> None:
    job = Job(launcher)
    (job.folder / "script.py").write_text(NOT_ELASTIC)
    job.start("-n", "2", "--spares", "1", "--max-restarts", "1")
    code, err = job.end()
    assert code == 0, err
    assert err.count("no worker has called ronde.elastic.run so far, so spare workers take no part") == 1
    assert "starting all workers again (restart 1 of 1)" in err


LEAVES = """\
import os, subprocess, sys, time
from ronde.process.membership_channel import membership
own = membership()
own.announce_continues()
if own.number == 0 and os.environ["RANK"] == "1":
    while not os.path.exists("waits"):
        time.sleep(0.01)
    time.sleep(0.1)  # the agent reads that the other worker waits
    if HOW == "leaves a process":
        subprocess.Popen(["sleep", "60"])
    if HOW == "has finished":
        own.announce_completed()
    sys.exit(0)
if own.number == 0:
    open("waits", "w").close()
    if own.await_place_or_end() is None:
        time.sleep(1)  # the last commit goes to the disk
own.announce_completed()
"""


@pytest.mark.parametrize("how", ["", "leaves a process"])
def test_a_worker_that_ends_in_the_training_lets_the_others_go_on(launcher: Launcher, how: str) -> None:
    job = Job(launcher)
    (job.folder / "script.py").write_text(f"HOW = {how!r}\n{LEAVES}")
    job.start("-n", "2", "--min-np", "1", "--max-restarts", "1")
    code, err = job.end()
    assert code == 0, err
    assert "1 worker goes on in place (round 1)" in err


def test_no_round_follows_when_all_ranks_have_finished_and_one_still_saves(launcher: Launcher) -> None:
    job = Job(launcher)
    (job.folder / "script.py").write_text(f"HOW = 'has finished'\n{LEAVES}")
    job.start("-n", "2", "--min-np", "1", "--max-restarts", "1")
    code, err = job.end()
    assert code == 0, err
    assert "round 1" not in err


def test_two_deaths_at_once(launcher: Launcher) -> None:
    job = Job(launcher)
    job.start("-n", "4", "--min-np", "1")
    first = job.await_round(0, 4)
    for rank in (1, 3):
        os.kill(first[rank].pid, signal.SIGKILL)
    while not any(place.size == 2 for place in job.heard):  # in round 1 or 2
        job.hear()
    code, _ = job.finish()
    assert code == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_and_the_reserve(launcher: Launcher, signum: int) -> None:
    job = Job(launcher)
    job.start("-n", "2", "--min-np", "1", "--spares", "1")
    first = job.await_round(0, 2)
    os.kill(first[0].pid, signal.SIGKILL)
    while not any(place.round == 1 for place in job.heard):  # with the spare, if it was ready
        job.hear()
    job.agents[0].send_signal(signum)
    code, _ = job.end()
    assert code == 128 + signum


# Several nodes.


class NodesJob(Job):
    """Agents that meet at a store of the first one."""

    def __init__(self, launcher: Launcher, nodes: str) -> None:
        super().__init__(launcher)
        self.nodes, self.port = nodes, free_port("127.0.0.1")

    def join(self, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent with two workers."""
        host = f"is_host={str(not self.agents).lower()}"
        place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job")
        conf = f"{host},keep_alive_interval=1,last_call_timeout=1"
        return self.start("-n", "2", "--nnodes", self.nodes, *place, "--rdzv-conf", conf, *options)


def test_the_workers_of_two_nodes_go_on_when_one_dies(launcher: Launcher) -> None:
    job = NodesJob(launcher, "2")
    for _ in range(2):
        job.join("--min-np", "2")
    first = job.await_round(0, 4)
    killed_ns = time.monotonic_ns()
    os.kill(first[3].pid, signal.SIGKILL)
    second = job.await_round(1, 3)
    print("ms:", [(place.told_ns - killed_ns) / 1e6 for place in second.values()])
    assert pids(second) == pids(first)[:3]
    (job.folder / "come").touch()
    third = job.await_round(2, 4)
    assert set(pids(second)) < set(pids(third))
    assert job.finish()[0] == job.end(1)[0] == 0


@pytest.mark.slow
def test_a_killed_agent_costs_only_its_own_workers(launcher: Launcher) -> None:
    job = NodesJob(launcher, "1:2")
    job.join()
    job.join()
    first = job.await_round(0, 4) if not alone_first(job) else job.await_round(1, 4)
    number = first[0].round
    ranks = [rank for rank, place in first.items() if place.pid in workers_of(job.agents[1].pid)]
    job.agents[1].kill()
    second = job.await_round(number + 1, 2)
    assert set(pids(second)) == {place.pid for rank, place in first.items() if rank not in ranks}
    assert job.finish()[0] == 0


def test_a_node_that_comes_and_leaves_costs_no_step(launcher: Launcher) -> None:
    job = NodesJob(launcher, "1:2")
    job.join()
    first = job.await_round(0, 2)
    job.join()
    (job.folder / "come").touch()
    second = job.await_round(1, 4)
    assert set(pids(first)) < set(pids(second))
    job.agents[1].send_signal(signal.SIGTERM)
    third = job.await_round(2, 2)
    assert pids(third) == pids(first)
    assert job.end(1)[0] == 128 + signal.SIGTERM
    assert "its workers go on until their next commit" in job.end(1)[1]
    assert job.finish()[0] == 0


COUNTS_SAMPLES = """\
import os, time
import numpy as np
import ronde

@ronde.elastic.run
def train(state):
    print(f"size {ronde.size()} steps {state.steps}", flush=True)
    for batch in state.batches(np.arange(240), global_batch=12, epochs=2, seed=1):
        time.sleep(0.02)
        with open(f"samples-{os.getpid()}", "a") as samples:
            print(*batch, file=samples)
        state.steps += 1
        state.commit()

train(ronde.elastic.ObjectState(steps=0))
"""


@pytest.mark.slow
def test_a_node_that_leaves_repeats_no_sample(launcher: Launcher) -> None:
    """A public complaint about Horovod: after a graceful leave samples were trained again."""
    job = NodesJob(launcher, "1:2")
    (job.folder / "script.py").write_text(COUNTS_SAMPLES)
    job.join()
    job.join()
    sizes: list[int] = []
    while 4 not in sizes or sizes[-1] == 4:  # until the node has left
        if match := re.search(r"size (\d)", job.lines.get(timeout=HANGING_S)):
            if 4 not in sizes and match[1] == "4":
                job.agents[1].send_signal(signal.SIGTERM)
            sizes.append(int(match[1]))
    assert job.end()[0] == 0
    assert job.end(1)[0] == 128 + signal.SIGTERM
    seen = [int(word) for path in job.folder.glob("samples-*") for word in path.read_text().split()]
    assert sorted(seen) == sorted([*range(240)] * 2)


FINISHES_LATE = """\
import os, time
import ronde
from ronde.process.membership_channel import membership

@ronde.elastic.run
def train(state):
    print(f"size {ronde.size()}", flush=True)
    if state.steps == 0:
        while not membership().change_wanted:
            time.sleep(0.001)
        state.steps += 1
    return state.steps

print("steps", train(ronde.elastic.ObjectState(steps=0)), flush=True)
"""


def test_a_node_that_joins_when_the_training_ends_takes_part_in_its_end(launcher: Launcher) -> None:
    job = NodesJob(launcher, "1:2")
    (job.folder / "script.py").write_text(FINISHES_LATE)
    job.join()
    while "size 4" not in (line := job.lines.get(timeout=HANGING_S)):
        if "size 2" in line and len(job.agents) == 1:
            job.join()
    assert job.end()[0] == job.end(1)[0] == 0
    assert job.end()[1].count("round 1") == 1


def alone_first(job: NodesJob) -> bool:
    """Return whether the first round had one node only, and let its workers come to the next one."""
    while not job.heard:
        job.hear()
    if job.heard[0].size == 4:
        return False
    (job.folder / "come").touch()
    return True


def workers_of(agent: int) -> set[int]:
    return {int(pid) for pid in (Path(f"/proc/{agent}/task/{agent}/children").read_text()).split()}


@pytest.mark.slow
def test_the_agent_that_serves_the_rendezvous_may_die_too(launcher: Launcher) -> None:
    job = NodesJob(launcher, "1:3")
    for _ in range(3):
        job.join()
    (job.folder / "come").touch()
    while not [place for place in job.heard if place.size == 6]:
        job.hear()
    number = job.heard[-1].round
    before = job.await_round(number, 6)
    lost = workers_of(job.agents[0].pid)
    job.agents[0].kill()
    while not [place for place in job.heard if place.round > number and place.size == 4]:
        job.hear()
    after = job.await_round(job.heard[-1].round, 4)
    assert set(pids(after)) == set(pids(before)) - lost
    job.finish()
    assert job.end(1)[0] == job.end(2)[0] == 0
