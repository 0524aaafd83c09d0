"""How soon a job trains again after a death, next to torchrun. See benchmarks/README.md.

python benchmarks/recovery.py --ranks 2 4 --csv recovery.csv
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ronde import settings

WORKER = str(pathlib.Path(__file__).with_name("recovering.py"))
LONGEST_S = 120.0  # after which a job counts as not recovered
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Step(NamedTuple):
    """The first all-reduce of one process."""

    pid: int
    rank: int
    size: int
    imported_ns: int
    done_ns: int


class Row(NamedTuple):
    """A line of the CSV file."""

    ranks: int
    fault: str
    contestant: str
    median_ms: float


class NotRecovered(Exception):
    """The job did not train again."""


class Job:
    """One or several agents and their workers, which report into a folder of the job."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start an agent."""
        with (self.folder / f"log{len(self._agents)}").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, *words, WORKER, str(self.folder)],
                env={**settings.environment(), "OMP_NUM_THREADS": "1", **(more or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._agents.append(agent)
        return agent

    def steps(self) -> dict[int, Step]:
        """Return what the workers have reported so far, by their process."""
        found = {}
        for path in self.folder.glob("[0-9]*"):
            numbers = [int(word) for word in path.read_text().split()]
            found[int(path.name)] = Step(int(path.name), *numbers)
        return found

    def await_steps(self, ranks: int, earlier: dict[int, Step], agent: subprocess.Popen[bytes]) -> list[Step]:
        """Return the first steps of a world of `ranks` workers that have not reported before. Raises NotRecovered."""
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            new = [step for pid, step in self.steps().items() if pid not in earlier and step.size == ranks]
            if {step.rank for step in new} == set(range(ranks)):
                return new
            if agent.poll() is not None:
                raise NotRecovered(f"the agent has ended with exit code {agent.returncode}")
            time.sleep(0.002)
        raise NotRecovered(f"nobody has trained for {LONGEST_S:g} s")

    def stop(self) -> None:
        """End the job well. Raises NotRecovered if it does not end so."""
        (self.folder / "stop").touch()
        for agent in self._agents:
            if agent.returncode != -signal.SIGKILL and agent.wait(LONGEST_S):
                raise NotRecovered(f"the job has ended with exit code {agent.returncode}")

    def close(self) -> None:
        """End what is left of it."""
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(40)
                agent.kill()
            agent.wait()
        for pid in self.steps():
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


def kill_worker(words: Sequence[str], ranks: int, more: dict[str, str]) -> float:
    """Return how many seconds after the death of one of its workers the job trains again. Raises NotRecovered."""
    with job() as running:
        agent = running.start(words, more)
        first = running.await_steps(ranks, {}, agent)
        time.sleep(0.5)
        victim = max(first, key=lambda step: step.rank)
        killed_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        again = running.await_steps(ranks, {step.pid: step for step in first}, agent)
        running.stop()
        return (max(step.done_ns for step in again) - killed_ns) / 1e9


class NodeTimes(NamedTuple):
    """Seconds: until the survivor trained alone, until both trained again, and the part of that until the import."""

    alone_s: float
    both_s: float
    import_s: float


def kill_node(agents: Callable[[int], list[str]], more: dict[str, str]) -> NodeTimes:
    """Kill one of two agents with its worker, and start it again. Raises NotRecovered."""
    with job() as running:
        survivor, other = (running.start(agents(index), more) for index in (0, 1))
        first = running.await_steps(2, {}, survivor)
        time.sleep(0.5)
        earlier = running.steps()
        own = [step.pid for step in first if _parent_is(step.pid, other.pid)]
        killed_ns = time.monotonic_ns()
        for pid in (other.pid, *own):
            os.kill(pid, signal.SIGKILL)
        other.wait()
        (alone,) = running.await_steps(1, earlier, survivor)
        earlier = running.steps()
        started_ns = time.monotonic_ns()
        running.start(agents(1), more)
        both = running.await_steps(2, earlier, survivor)
        running.stop()
        return NodeTimes(
            (alone.done_ns - killed_ns) / 1e9,
            (max(step.done_ns for step in both) - started_ns) / 1e9,
            (max(step.imported_ns for step in both) - started_ns) / 1e9,
        )


def _parent_is(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


def _ronde(ranks: int) -> list[str]:
    return ["-m", "ronde", "run", "-n", str(ranks), "--max-restarts", "3"]


def _torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]


def _nodes(launcher: Sequence[str], port: int) -> Callable[[int], list[str]]:
    def words(index: int) -> list[str]:
        serves = f"--rdzv-conf=is_host={str(index == 0).lower()}"
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=recovery", serves]
        return [*launcher, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *meeting]

    return words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def measure_workers(ranks: int, rounds: int, torchrun_rounds: int, default_rounds: int) -> list[Row]:
    """Kill a worker again and again, in turns under each launcher."""
    contestants: dict[str, tuple[list[str], dict[str, str], int]] = {
        "ronde": (_ronde(ranks), {}, rounds),
        "torchrun-own-store": (_torchrun(ranks), OWN_STORE, torchrun_rounds),
        "torchrun": (_torchrun(ranks), {}, default_rounds),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(max(rounds, torchrun_rounds, default_rounds)):
        for name, (words, more, most) in contestants.items():
            if turn < most:
                with contextlib.suppress(NotRecovered):
                    times[name].append(kill_worker(words, ranks, more))
    print(f"\nkill -9 of one of {ranks} workers: until all have done their next all-reduce")
    rows = []
    for name, (_, _, most) in contestants.items():
        taken = times[name]
        median = statistics.median(taken) if taken else float("nan")
        rival = (
            statistics.median(times["torchrun-own-store"]) if times["torchrun-own-store"] else float("nan")
        )
        print(
            f"{name:>20}  {len(taken)} of {most} recovered  {median:8.2f} s  {median / rival:6.2f}",
            flush=True,
        )
        if taken:
            rows.append(Row(ranks, "worker killed", name, median * 1e3))
    return rows


def measure_nodes(rounds: int, torchrun_rounds: int) -> list[Row]:
    """Kill one of two agents with its worker, and bring it back."""
    print("\nkill -9 of one of two agents and its worker: until the survivor trains alone, until both train")
    rows = []
    for name, launcher, most in (
        ("ronde", ["-m", "ronde", "run"], rounds),
        ("torchrun", ["-m", "torch.distributed.run"], torchrun_rounds),
    ):
        times = []
        for _ in range(most):
            try:
                times.append(kill_node(_nodes(launcher, _free_port()), {}))
            except NotRecovered as problem:
                print(f"{name:>20}  not recovered: {problem}", flush=True)
        if times:
            alone, both, imports = (statistics.median(column) for column in zip(*times))
            rest = f"{both:.2f} s of which {imports:.2f} s until torch was imported"
            print(f"{name:>20}  {len(times)} of {most}  alone {alone:.2f} s  both {rest}", flush=True)
            rows += [Row(2, "node killed", name, alone * 1e3), Row(2, "node back", name, both * 1e3)]
    return rows


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torchrun-rounds", type=int, default=20)
    parser.add_argument(
        "--torchrun-default-rounds", type=int, default=4, help="of torchrun as it is by default"
    )
    parser.add_argument("--node-rounds", type=int, default=5)
    parser.add_argument("--torchrun-node-rounds", type=int, default=0, help="each takes a minute or two")
    parser.add_argument("--csv", type=pathlib.Path)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    rows = []
    for ranks in arguments.ranks:
        rows += measure_workers(
            ranks, arguments.rounds, arguments.torchrun_rounds, arguments.torchrun_default_rounds
        )
    if arguments.node_rounds or arguments.torchrun_node_rounds:
        rows += measure_nodes(arguments.node_rounds, arguments.torchrun_node_rounds)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
