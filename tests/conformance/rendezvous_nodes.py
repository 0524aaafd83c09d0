"""Nodes that meet, for tests: in this process, or as processes that can be killed and stopped.

    python -m tests.conformance.rendezvous_nodes '{"backend": "file", ...}' NAME KEY

is such a process. It joins again whenever it can, prints a line for each event, and succeeds when it reads a line on
its standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Self, TypeVar

from ronde.rendezvous.membership import (
    Budget,
    Ejected,
    JobClosed,
    Node,
    Notice,
    RendezvousBroken,
    RendezvousEvent,
    Round,
    RoundBegan,
    RoundEnded,
)
from ronde.rendezvous.rendezvous import Rendezvous, RendezvousConfig, create
from ronde.settings import JobKey

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
S = 10**9
ONE_RESTART = Budget(1)

EventType = TypeVar("EventType", bound=RendezvousEvent)


def node(name: str, wish: int = -1) -> Node:
    return Node(name, f"host-{name}", "127.0.0.1", 2, "tcp:127.0.0.1:9", 1024, wish=wish)


class TestNode:
    """A node in this process."""

    __test__ = False

    def __init__(
        self, config: RendezvousConfig, key: JobKey, name: str, budget: Budget = ONE_RESTART, wish: int = -1
    ) -> None:
        self.node = node(name, wish)
        self.budget = budget
        self.rendezvous: Rendezvous = create(config, key)
        self.told: list[RendezvousEvent] = []
        self.join()

    def join(self) -> Self:
        self.rendezvous.join(self.node, self.budget)
        return self

    def expect(self, kind: type[EventType]) -> EventType:
        """Wait for the next event, which must be of this kind; notices do not count."""
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            while self.told:
                event = self.told.pop(0)
                if not isinstance(event, Notice) or kind is Notice:
                    assert isinstance(event, kind), f"{self.node.id} was told {event}"
                    return event
            select.select([self.rendezvous], [], [], 1)
            self.told += self.rendezvous.events()
        raise AssertionError(f"{self.node.id} was not told {kind.__name__}")

    def begins(self) -> Round:
        return self.expect(RoundBegan).round

    def ends(self) -> RoundEnded:
        return self.expect(RoundEnded)

    def is_told_nothing(self, for_s: float = 0.3) -> bool:
        select.select([self.rendezvous], [], [], for_s)
        self.told += [event for event in self.rendezvous.events() if not isinstance(event, Notice)]
        return not self.told

    def close(self) -> None:
        self.rendezvous.close()


class ProcessNode:
    """A node in another process."""

    def __init__(self, config: RendezvousConfig, key: JobKey, name: str) -> None:
        self.name, self.config, self.key = name, config, key
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.rendezvous_nodes", json.dumps(asdict(config)), name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.process.stdin
        self.process.stdin.write(key.hex() + "\n")

    def says(self, wanted: str) -> str:
        """Wait for a line with this beginning; return the rest."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(wanted):
                return line.removeprefix(wanted).strip()
        raise AssertionError(f"{self.name} ended without saying {wanted}")

    def succeed(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("succeed\n")

    def stop(self) -> None:
        """Stop the process, but not while it has the lock of a store in a file, which would block all others."""
        while True:
            self.signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if not self._has_locked():
                return
            self.signal(signal.SIGCONT)
            time.sleep(0.001)

    def _has_locked(self) -> bool:
        files = Path(f"/proc/{self.process.pid}/fd")
        return any(
            "lock:" in (files.parent / "fdinfo" / file.name).read_text()
            for file in files.iterdir()
            if not os.readlink(file).endswith(".alive")  # where it shows that it lives
        )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            try:
                pipe.close()
            except BrokenPipeError:
                pass


def main(arguments: str, name: str) -> None:
    key = JobKey.from_hex(sys.stdin.readline().strip())
    rendezvous = create(RendezvousConfig(**json.loads(arguments)), key)
    rendezvous.join(node(name), Budget(1))
    while True:
        ready, _, _ = select.select([rendezvous, sys.stdin], [], [])
        if sys.stdin in ready:
            sys.stdin.readline()
            rendezvous.succeed()
        for event in rendezvous.events():
            match event:
                case RoundBegan(round):
                    print("began", round.number, len(round.nodes), round.group_rank, flush=True)
                case RoundEnded() | Ejected():
                    print("ended" if isinstance(event, RoundEnded) else "ejected", event, flush=True)
                    rendezvous.join(node(name), Budget(1))
                case Notice():
                    pass
                case _:
                    print(type(event).__name__, event, flush=True)
                    rendezvous.close()
                    sys.exit(isinstance(event, JobClosed | RendezvousBroken))


if __name__ == "__main__":
    main(*sys.argv[1:])
