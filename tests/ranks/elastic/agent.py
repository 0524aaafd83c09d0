"""Plays the agent of one node for tests of survivors: gives workers their places by the channel, and replaces the dead.

Workers run a Python program. Each line that one prints on standard output is JSON, and becomes a `Line`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ronde.job_key import JobKey
from ronde.process.membership_channel import (
    Awaits,
    ChangeWanted,
    Completed,
    Continues,
    FromWorker,
    MembershipChannel,
    PlaceInRound,
    RoundLost,
)
from ronde.stores.server import StoreServer

HANG_S = 60


@dataclass(frozen=True)
class Line:
    """What a worker has printed. `worker`: its number, which no other one has."""

    worker: int
    at_ns: int
    value: Any


class Worker:
    """One worker process and the agent's end of its channel."""

    def __init__(self, number: int, argv: list[str], environment: dict[str, str]) -> None:
        self.number = number
        self.channel = MembershipChannel()
        self.rank = -1
        self.continues = self.is_ready = self.has_completed = False
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "RONDE_ROUND")}
        self.process = subprocess.Popen(
            argv,
            env={**inherited, **environment, **self.channel.environment, "PYTHONUNBUFFERED": "1"},
            pass_fds=[self.channel.worker_fd],
            stdout=subprocess.PIPE,
        )
        self.channel.close_worker_end()
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._rest = b""

    def lines(self) -> Iterator[Any]:
        while piece := self.output.read(1 << 16):
            self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        yield from (json.loads(line) for line in lines if line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()
        self.channel.close()
        os.close(self.pidfd)


@dataclass
class Agent:
    """The agent. `replaces`: whether it starts a process for each one that dies, which joins when it is ready."""

    program: list[str]
    size: int
    replaces: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    said: list[tuple[int, FromWorker]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.members: list[int] = []
        self._round = -1
        self._key = JobKey.generate()
        self._store: StoreServer | None = None
        self._started = 0
        self._events = selectors.DefaultSelector()
        self.members = [self.start(has_place=True) for _ in range(self.size)]
        self._begin_round("the job begins", ())

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.workers.values():
            each.close()
        self._events.close()
        if self._store is not None:
            self._store.close()

    def start(self, has_place: bool = False) -> int:
        """Start a process, a spare until it has a place; return its number."""
        number, self._started = self._started, self._started + 1
        made = Worker(
            number, [sys.executable, *self.program], {"RONDE_JOB_KEY": self._key.hex(), **self.environment}
        )
        self.workers[number] = made
        for source in (made.channel, made.output, made.pidfd):
            self._events.register(source, selectors.EVENT_READ, made)
        return number

    def _begin_round(self, reason: str, lost: tuple[str, ...]) -> None:
        self._round += 1
        previous, self._store = (
            self._store,
            StoreServer(f"unix:@ronde-{os.getpid()}-{id(self)}-{self._round}", self._key),
        )
        for rank, number in enumerate(self.members):
            place = {
                "RANK": rank, "WORLD_SIZE": len(self.members), "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": len(self.members), "RONDE_STORE": self._store.address,
            }  # fmt: skip
            worker = self.workers[number]
            worker.rank = rank
            worker.channel.send(
                PlaceInRound(self._round, {name: str(value) for name, value in place.items()}, reason, lost)
            )
        if previous is not None:
            previous.close()

    def add(self, count: int = 1) -> None:
        """Start processes that join the others when they are ready."""
        for _ in range(count):
            self.start()

    def remove(self, number: int, reason: str = "a host is withdrawn") -> None:
        """Let a member leave without a loss: it gets no place, and ends."""
        self.members.remove(number)
        self._begin_round(reason, ())
        self.workers[number].channel.send(ChangeWanted(self._round, reason))

    def kill(self, number: int, by: signal.Signals = signal.SIGKILL) -> int:
        """Kill a worker; return when, of the monotonic clock."""
        at_ns = time.monotonic_ns()
        os.kill(self.workers[number].process.pid, by)
        return at_ns

    def run(self, until: Callable[[], bool] | None = None, hang_s: float = HANG_S) -> None:
        """Serve the workers until this is true, or all have ended."""
        deadline = time.monotonic() + hang_s
        while self.workers and not (until is not None and until()):
            left = deadline - time.monotonic()
            assert left > 0, f"nothing more happens; {self.lines[-20:]}, {self.codes}, {self.said[-20:]}"
            for key, _ in self._events.select(left):
                self._serve(key.data, key.fileobj)

    def of(self, worker: int) -> list[Any]:
        """Return what a worker has printed."""
        return [line.value for line in self.lines if line.worker == worker]

    def _serve(self, worker: Worker, source: object) -> None:
        if worker.number not in self.workers:
            return
        if source is worker.channel:
            self._read_channel(worker)
        elif source == worker.pidfd:
            self._end(worker)
        else:
            self._read_lines(worker)

    def _read_lines(self, worker: Worker) -> None:
        now_ns = time.monotonic_ns()
        self.lines += [Line(worker.number, now_ns, value) for value in worker.lines()]

    def _read_channel(self, worker: Worker) -> None:
        for message in worker.channel.read():
            self.said.append((worker.number, message))
            match message:
                case Continues():
                    worker.continues = True
                case Completed():
                    worker.has_completed = True
                case Awaits(-1) if worker.number not in self.members:
                    self.members.append(worker.number)
                    self._begin_round(f"worker {worker.number} has come", ())
                case Awaits():
                    pass
        if worker.channel.has_ended:
            self._events.unregister(worker.channel)

    def _end(self, worker: Worker) -> None:
        self.codes[worker.number] = worker.process.wait()
        self._read_lines(worker)
        self._read_channel_at_end(worker)
        for source in (worker.pidfd, worker.output):
            self._events.unregister(source)
        del self.workers[worker.number]
        worker.close()
        if worker.number not in self.members:
            return
        if worker.has_completed and self.codes[worker.number] == 0:
            return
        self.members.remove(worker.number)
        lost = f"rank {worker.rank} (pid {worker.process.pid}) ended with {self.codes[worker.number]}"
        for number in self.members:
            self.workers[number].channel.send(RoundLost(self._round, lost))
        if self.members:
            self._begin_round(lost, (lost,))
        if self.replaces:
            self.start()

    def _read_channel_at_end(self, worker: Worker) -> None:
        if not worker.channel.has_ended:
            self._read_channel(worker)
        if not worker.channel.has_ended:
            self._events.unregister(worker.channel)
