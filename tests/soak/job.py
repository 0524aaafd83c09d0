"""A job under test: agents that run `ronde run`, the facts of their workers, and all its processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.soak.places import Place

WORKER = str(Path(__file__).with_name("worker.py"))
MARK = "SOAK_MARK"
HEARTBEAT_S = 1.0
SILENCE_S = 3 * HEARTBEAT_S


class Fact(NamedTuple):
    """One line of a worker's facts; `at` in seconds of the monotonic clock."""

    at: float
    what: str
    facts: dict[str, Any]


@dataclass
class Worker:
    """What one worker has written down; `begins` is its first fact."""

    pid: int
    begins: dict[str, Any]
    facts: list[Fact] = field(repr=False)

    @property
    def agent(self) -> str:
        return str(self.begins["agent"])

    @property
    def round(self) -> str:
        """The store in which its round meets is no other round's."""
        return str(self.begins["ronde_store"])

    @property
    def number(self) -> int:
        """The round's, as far as this is known: it is in the name of the log directory."""
        name = Path(self.begins["logs"]).parent.name
        return int(name.removeprefix("attempt_")) if name.startswith("attempt_") else -1

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended well, before all was done."""
        return self.facts[-1].facts.get("order") == "exit 0"

    def works(self, since: float) -> bool:
        """Whether it has acted since then."""
        return is_alive(self.pid) and max(self.acts(), default=0.0) > since

    def acts(self) -> list[float]:
        return [fact.at for fact in self.facts if fact.what == "acts"]


@dataclass
class Agent:
    """One `ronde run`. `sent`: the signals that we sent to it, with their times."""

    name: str
    slots: int
    process: subprocess.Popen[bytes]
    folder: Path
    started: float
    sent: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0

    def signal(self, signum: int) -> None:
        self.sent.append((time.monotonic(), signum))
        self.process.send_signal(signum)

    def got(self, *signums: int) -> bool:
        return any(signum in signums for _, signum in self.sent)

    @property
    def lives(self) -> bool:
        if self.process.poll() is not None and not self.ended:
            self.ended = time.monotonic()
        return not self.ended

    def text(self, stream: str) -> str:
        return (self.folder / f"{self.name}.{stream}").read_text(errors="replace")


@dataclass(frozen=True)
class Shape:
    """What kind of job a seed stands for."""

    place: str
    least: int
    most: int
    slots: tuple[int, ...] = field(repr=False)  # of each agent, as they come
    work: str
    restarts: int
    output: tuple[str, ...]
    preload: bool
    full_disk: bool

    @staticmethod
    def draw(rng: random.Random, places: tuple[str, ...], works: tuple[str, ...]) -> Shape:
        most = rng.choice((1, 2, 2, 3, 3, 4))
        return Shape(
            place=rng.choice(places),
            least=rng.randint(1, min(most, 2)),
            most=most,
            slots=tuple(rng.choice((1, 1, 2, 3)) for _ in range(64)),
            work=rng.choice(works),
            restarts=rng.choice((0, 1, 3, 50, 50, 50, 50)),
            output=rng.choice(((), ("--redirects", "3"), ("--tee", "3"))),
            preload=rng.random() < 0.5,
            full_disk=rng.random() < 0.1,
        )


class Job:
    """The agents of one job, at their place; `folder` is theirs."""

    def __init__(self, shape: Shape, place: Place, folder: Path, mark: str) -> None:
        self.shape = shape
        self.place = place
        self.folder = folder
        self.mark = mark
        self.agents: list[Agent] = []
        self._workers: dict[str, Worker] = {}  # by the names of their files
        self._read: dict[str, int] = {}  # how much of each file
        for name in ("facts", "orders", "tmp", "logs"):
            (folder / name).mkdir(exist_ok=True)

    def living(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.lives]

    def start(self) -> Agent:
        shape, index = self.shape, len(self.agents)
        name = f"agent{index}"
        conf = f"keep_alive_interval={HEARTBEAT_S:g},last_call_timeout=1,exit_barrier_timeout=60"
        words = [
            *("--nnodes", f"{shape.least}:{shape.most}", *self.place.words, "--rdzv-id", "soak"),
            *("--rdzv-conf", f"{conf},{self.place.conf}".rstrip(",")),
            *("--nproc-per-node", str(shape.slots[index]), "--max-restarts", str(shape.restarts)),
            *("--shutdown-timeout", "1", "--start-timeout", "40", "--log-dir", str(self.folder / "logs")),
            *shape.output,
            *(() if shape.preload else ("--preload", "none")),
            *(WORKER, shape.work),
        ]
        own = {"SOAK_FOLDER": str(self.folder), "SOAK_AGENT": name, "TMPDIR": str(self.folder / "tmp")}
        environment = {**os.environ, **own, MARK: self.mark}
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "ronde", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        agent = Agent(name, shape.slots[index], process, self.folder, time.monotonic())
        self.agents.append(agent)
        return agent

    def order(self, pid: int, what: str) -> None:
        """Tell a worker what to do, in one step."""
        path = self.folder / "orders" / str(pid)
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)

    def workers(self) -> list[Worker]:
        """All that there have ever been and that have said so, by the time at which they began."""
        for name in os.listdir(self.folder / "facts"):
            with (self.folder / "facts" / name).open("rb") as file:
                file.seek(self._read.get(name, 0))
                new = file.read()
            lines = [json.loads(line) for line in new[: new.rfind(b"\n") + 1].splitlines()]
            facts = [Fact(line["at"] / 1e9, line["what"], line) for line in lines]
            if not facts:
                continue
            self._read[name] = self._read.get(name, 0) + new.rfind(b"\n") + 1
            worker = self._workers.setdefault(name, Worker(int(name), facts[0].facts, []))
            worker.facts.extend(facts)
        return sorted(self._workers.values(), key=lambda worker: worker.facts[0].at)


class Seen(NamedTuple):
    """A process as /proc shows it."""

    pid: int
    parent: int
    state: str
    command: str


def processes() -> Iterator[Seen]:
    """All processes, dead ones that nobody has reaped included."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
        yield Seen(int(folder.name), int(parent), state, command)


def marked(mark: str) -> list[Seen]:
    """The living processes that came of a job: each inherits the mark."""
    found = []
    for seen in processes():
        try:
            environment = Path(f"/proc/{seen.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if seen.state not in "ZX" and f"{MARK}={mark}".encode() in environment:
            found.append(seen)
    return found


def children(pid: int) -> list[Seen]:
    return [seen for seen in processes() if seen.parent == pid and seen.state not in "ZX"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
