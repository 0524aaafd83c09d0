"""The jobs of recovery.py: launchers, their workers (recovering.py), which report into a folder, and the faults."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ronde import settings
from ronde.testing.hosts import Hosts

WORKER = str(pathlib.Path(__file__).with_name("recovering.py"))
LONGEST_S = 60.0  # after which a job counts as not recovered
SETTLE_S = 1.5  # between the first steps of a job and the fault: a template has its imports then


class WorldStart(NamedTuple):
    """The first all-reduce of one process in one world."""

    pid: int
    rank: int
    size: int
    imported_ns: int
    done_ns: int


class Recovery(NamedTuple):
    """Milliseconds from the fault until all ranks have done a step, and until new processes had their imports.

    `imports_ms` is 0 if there are none.
    """

    total_ms: float
    imports_ms: float


class NotRecovered(Exception):
    """The job did not train again."""


class Command(NamedTuple):
    """How a contestant is started: the words before and after the worker's path, and variables.

    `alone` is for a program without a launcher: one process for each rank.
    """

    launcher: tuple[str, ...]
    worker: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})
    python: str = sys.executable
    alone: int = 0


class Job:
    """One or several launchers and their workers, which report into a folder of the job."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, command: Command, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a launcher, or all ranks of a program without one. Return the last process."""
        for rank in range(command.alone or 1):
            places = {"RANK": str(rank), "WORLD_SIZE": str(command.alone)} if command.alone else {}
            kind, *rest = command.worker
            words = [*before, command.python, *command.launcher, WORKER, kind, str(self.folder), *rest]
            with (self.folder / f"log{len(self.launchers)}").open("wb") as log:
                launcher = subprocess.Popen(
                    words,
                    env={**settings.environment(), "OMP_NUM_THREADS": "1", **command.environment, **places},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.launchers.append(launcher)
        return launcher

    def starts(self) -> list[WorldStart]:
        """Return what the workers have reported so far."""
        found = []
        for path in self.folder.glob("[0-9]*"):
            for line in path.read_text().splitlines():
                numbers = [int(word) for word in line.split()]
                found.append(WorldStart(int(path.name), *numbers))
        return found

    def await_world(self, ranks: int, after_ns: int) -> list[WorldStart]:
        """Return the first steps after a time of all ranks of a world of this size. Raises NotRecovered."""
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            new = {
                each.rank: each for each in self.starts() if each.size == ranks and each.done_ns > after_ns
            }
            if len(new) == ranks:
                return list(new.values())
            if all(launcher.poll() is not None for launcher in self.launchers):
                raise NotRecovered(f"the job has ended: {self.last_words()}")
            time.sleep(0.002)
        raise NotRecovered(f"nobody has trained for {LONGEST_S:g} s: {self.last_words()}")

    def last_words(self) -> str:
        """Return the last lines of the logs."""
        logs = [path.read_text(errors="replace").strip() for path in sorted(self.folder.glob("log*"))]
        return " / ".join(log[-600:] for log in logs)

    def stop(self) -> None:
        """End the job well. Raises NotRecovered if it does not end so."""
        (self.folder / "stop").touch()
        for launcher in self.launchers:
            try:
                code = launcher.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                raise NotRecovered("the job has recovered, and did not end") from None
            if code and code != -signal.SIGKILL:
                raise NotRecovered(f"the job has ended with exit code {code}: {self.last_words()}")

    def close(self) -> None:
        """End what is left of it."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(40)
                launcher.kill()
            launcher.wait()
        for pid in {each.pid for each in self.starts()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def job() -> Iterator[Job]:
    """Give a job that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ronde-benchmark-") as folder:
        running = Job(pathlib.Path(folder))
        try:
            yield running
        finally:
            running.close()


def lose_worker(command: Command, ranks: int, ranks_after: int) -> Recovery:
    """Kill the last rank, and wait for a world of `ranks_after`. Raises NotRecovered."""
    with job() as running:
        running.start(command)
        first = running.await_world(ranks, 0)
        time.sleep(SETTLE_S)
        victim = max(first, key=lambda start: start.rank)
        killed_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        again = running.await_world(ranks_after, killed_ns)
        running.stop()
        return recovery(killed_ns, again)


def recovery(fault_ns: int, again: Sequence[WorldStart]) -> Recovery:
    """Return how long it took, from the first steps of the new world."""
    imported_ns = max(start.imported_ns for start in again)
    return Recovery(
        (max(start.done_ns for start in again) - fault_ns) / 1e6, max(0.0, (imported_ns - fault_ns) / 1e6)
    )


class NodeTimes(NamedTuple):
    """Milliseconds: until the survivors trained alone, and from the start of the new agent until all trained again."""

    alone: Recovery
    back: Recovery


def lose_node(commands: Sequence[Command]) -> NodeTimes:
    """Kill one of two agents with its worker, and start it again. Raises NotRecovered."""
    with job() as running:
        running.start(commands[0])
        other = running.start(commands[1])
        first = running.await_world(2, 0)
        time.sleep(SETTLE_S)
        own = [start.pid for start in first if _descends_from(start.pid, other.pid)]
        killed_ns = time.monotonic_ns()
        for pid in (other.pid, *own):
            os.kill(pid, signal.SIGKILL)
        other.wait()
        alone = running.await_world(1, killed_ns)
        started_ns = time.monotonic_ns()
        running.start(commands[1])
        both = running.await_world(2, started_ns)
        running.stop()
        return NodeTimes(recovery(killed_ns, alone), recovery(started_ns, both))


def _descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


def lose_host(two: Hosts, commands: Sequence[Command], ranks: int) -> Recovery:
    """Cut the link of the second of two hosts, and wait for the ranks of the first. Raises NotRecovered."""
    with job() as running:
        for host, command in enumerate(commands):
            running.start(command, two.command(host))
        running.await_world(ranks, 0)
        time.sleep(SETTLE_S)
        cut_ns = time.monotonic_ns()
        two.disconnect(1)
        try:
            again = running.await_world(ranks // 2, cut_ns)
        finally:
            two.reconnect(1)
        return recovery(cut_ns, again)


class Goodput(NamedTuple):
    """Steps that counted, the seconds that they took together, and how many workers were lost.

    `step_s` is the duration of one step without a loss.
    """

    steps: int
    elapsed_s: float
    losses: int
    step_s: float

    @property
    def share(self) -> float:
        """The share of time in steps that counted."""
        return self.steps * self.step_s / self.elapsed_s


def lose_again_and_again(command: Command, ranks: int, every_s: float, duration_s: float) -> Goodput:
    """Kill a worker every so many seconds. Raises NotRecovered."""
    with job() as running:
        running.start(command)
        began_ns = max(start.done_ns for start in running.await_world(ranks, 0))
        losses = 0
        while time.monotonic_ns() + every_s * 1e9 < began_ns + duration_s * 1e9:
            time.sleep(every_s)
            newest = {start.pid: start for start in sorted(running.starts(), key=lambda each: each.done_ns)}
            living = [pid for pid in newest if pathlib.Path(f"/proc/{pid}").exists()]
            os.kill(living[losses % len(living)], signal.SIGKILL)
            losses += 1
        time.sleep(max(0.0, (began_ns + duration_s * 1e9 - time.monotonic_ns()) / 1e9))
        running.stop()
        steps, ended_ns, step_ns = (int(word) for word in (running.folder / "steps").read_text().split())
        return Goodput(steps, (ended_ns - began_ns) / 1e9, losses, step_ns / 1e9)
