"""One agent with real workers that continue: all that they use is the channel of `process/membership_channel`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest
from tests.ranks.launcher.test_launcher import HANGING_S, Launcher, end

# Each worker says its place in each round. A file `finish` ends the job; `come` makes workers leave a world to which
# another is wanted, as a commit does.
WORKER = """\
import os, sys, threading, time
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
    while not lost and not (own.change_wanted and os.path.exists("come")):
        if os.path.exists("finish"):
            own.announce_completed()
            sys.exit(0)
        time.sleep(0.001)
    lost.clear()
    number = own.await_place(number).number
"""


class Place:
    """What a worker has said of its place."""

    def __init__(self, match: re.Match[str]) -> None:
        self.pid, self.told_ns, self.rank, self.size, self.round = (int(match[i]) for i in range(1, 6))
        self.store = match[6]


class Job:
    """One `ronde run` of `WORKER`."""

    def __init__(self, launcher: Launcher, *options: str) -> None:
        self.folder = launcher.folder
        (self.folder / "script.py").write_text(WORKER)
        self.process: subprocess.Popen[bytes] = launcher.start(*options, "script.py")
        self.heard: list[Place] = []

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
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line, f"the job ended with {self.process.wait(HANGING_S)}"
        if match := re.search(r"here (\d+) (\d+) (\d+) (\d+) (\d+) (\S+)", line):
            place = Place(match)
            assert line.startswith(f"[{place.rank}] "), "the prefix is that of the present rank"
            self.heard.append(place)

    def finish(self) -> tuple[int, str]:
        """End the job; return its exit code and what it said on standard error."""
        (self.folder / "finish").touch()
        code, _, err = end(self.process)
        return code, err


def pids(places: dict[int, Place]) -> list[int]:
    return [place.pid for _, place in sorted(places.items())]


def test_a_job_goes_on_with_fewer_workers_and_grows_again(launcher: Launcher) -> None:
    job = Job(launcher, "-n", "4", "--min-np", "2")
    first = job.await_round(0, 4)
    killed_ns = time.monotonic_ns()
    os.kill(first[2].pid, signal.SIGKILL)
    second = job.await_round(1, 3)
    assert pids(second) == [first[rank].pid for rank in (0, 1, 3)]
    print("ms:", [(place.told_ns - killed_ns) / 1e6 for place in second.values()])
    (job.folder / "come").touch()
    third = job.await_round(2, 4)
    assert pids(third)[:3] == pids(second)
    assert third[3].pid not in pids(first)
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
    job = Job(launcher, "-n", "3", "--max-restarts", "2")
    first = job.await_round(0, 3)
    os.kill(first[0].pid, signal.SIGKILL)
    second = job.await_round(1, 3)
    assert pids(second)[:2] == pids(first)[1:]
    os.kill(second[1].pid, signal.SIGKILL)
    third = job.await_round(2, 3)
    assert pids(third)[:2] == [second[0].pid, second[2].pid]
    os.kill(third[0].pid, signal.SIGKILL)
    code, _, err = end(job.process)
    assert code == 137
    assert "were ended by the launcher" in err


def test_a_spare_takes_part_in_the_next_round(launcher: Launcher) -> None:
    job = Job(launcher, "-n", "2", "--spares", "1")
    first = job.await_round(0, 2)
    time.sleep(1)
    os.kill(first[1].pid, signal.SIGKILL)
    second = job.await_round(1, 2)
    assert second[0].pid == first[0].pid
    code, err = job.finish()
    assert code == 0
    assert "1 worker goes on in place (round 1), 1 from the reserve takes part\n" in err


def test_two_deaths_at_once(launcher: Launcher) -> None:
    job = Job(launcher, "-n", "4", "--min-np", "1")
    first = job.await_round(0, 4)
    for rank in (1, 3):
        os.kill(first[rank].pid, signal.SIGKILL)
    while not any(place.size == 2 for place in job.heard):  # in round 1 or 2
        job.hear()
    code, _ = job.finish()
    assert code == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_and_the_reserve(launcher: Launcher, signum: int) -> None:
    job = Job(launcher, "-n", "2", "--min-np", "1", "--spares", "1")
    first = job.await_round(0, 2)
    os.kill(first[0].pid, signal.SIGKILL)
    while not any(place.round == 1 for place in job.heard):  # with the spare, if it was ready
        job.hear()
    job.process.send_signal(signum)
    code, _, _ = end(job.process)
    assert code == 128 + signum
