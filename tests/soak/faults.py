"""The faults of the soak. Each fault chooses a victim, strikes, and returns a description.

A fault that needs a repair leaves it in `pending`; the schedule runs it when its time has come.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.job import SILENCE_S, Agent, Job, Worker, children, is_alive, send

ZYGOTE = "zygote.py"


@dataclass(frozen=True)
class Harm:
    """What was done, when, to whom; `code` is the exit code of a worker that dies of it, -1 if it does not say."""

    at: float
    what: str
    agent: str = ""
    pid: int = 0
    code: int | None = None  # None: no worker fails of it by itself
    kills: tuple[int, ...] = ()  # processes that must be gone in a moment


@dataclass
class Faults:
    """All faults of one run, drawn from `rng`."""

    job: Job
    rng: random.Random
    harms: list[Harm] = field(default_factory=list)
    pending: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def strike(self, name: str) -> str:
        """Do it; returns to whom, or nothing if there is no victim."""
        return KINDS[name][1](self) or ""

    def mend(self, everything: bool = False) -> None:
        """Do what is due, or all that is to be done."""
        now = time.monotonic()
        due = [each for each in self.pending if everything or each[0] <= now]
        self.pending = [each for each in self.pending if each not in due]
        for _, do in due:
            do()

    def note(self, what: str, **facts: object) -> None:
        self.harms.append(Harm(time.monotonic(), what, **facts))  # type: ignore[arg-type]

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self.pending.append((time.monotonic() + seconds, do))

    # Victims

    def worker(self) -> Worker | None:
        lives = [worker for worker in self.job.workers() if is_alive(worker.pid)]
        return self.rng.choice(lives) if lives else None

    def agent(self) -> Agent | None:
        lives = self.job.living()
        return self.rng.choice(lives) if lives else None

    # Workers

    def signal_worker(self, signum: int) -> str | None:
        if not (worker := self.worker()):
            return None
        self.note("a worker gets a signal", agent=worker.agent, pid=worker.pid, code=128 + signum)
        send(worker.pid, signum)
        return f"{worker.pid} of {worker.agent}"

    def freeze_worker(self) -> str | None:
        if not (worker := self.worker()):
            return None
        self.note("a worker is frozen", agent=worker.agent, pid=worker.pid)
        send(worker.pid, signal.SIGSTOP)
        self.later(self.rng.choice((0.1, 1.0, 2.5)), lambda: send(worker.pid, signal.SIGCONT))
        return f"{worker.pid} of {worker.agent}"

    def order(self, what: str, code: int | None) -> str | None:
        if not (worker := self.worker()):
            return None
        if code == 0 and self.job.shape.work != "alone":
            code = -1  # others fail, for they have lost it
        self.note(f"a worker is to {what}", agent=worker.agent, pid=worker.pid, code=code or None)
        self.job.order(worker.pid, what)
        return f"{worker.pid} of {worker.agent}: {what}"

    # Agents

    def kill_agent(self) -> str | None:
        if not (agent := self.agent()):
            return None
        family = tuple(
            seen.pid for child in children(agent.process.pid) for seen in (child, *children(child.pid))
        )
        agent.signal(signal.SIGKILL)
        self.note("an agent is killed", agent=agent.name, kills=family)
        return agent.name

    def end_agent(self, signum: int) -> str | None:
        if not (agent := self.agent()):
            return None
        agent.signal(signum)
        self.note("an agent is told to end", agent=agent.name)
        return agent.name

    def freeze_agent(self) -> str | None:
        if not (agent := self.agent()):
            return None
        # Who cannot reach a frozen machine that keeps the store ends, so this is only done where no agent keeps it.
        seconds = self.rng.choice((0.2, 0.7) if self.job.place.in_agent else (0.2, 0.7, SILENCE_S + 2))
        agent.signal(signal.SIGSTOP)
        self.note("an agent is frozen", agent=agent.name)
        self.later(seconds, lambda: agent.signal(signal.SIGCONT))
        return f"{agent.name} for {seconds:g} s"

    def new_agent(self) -> str | None:
        if len(self.job.living()) >= self.job.shape.most:
            return None
        return self.job.start().name

    def kill_template(self) -> str | None:
        """And with it the workers that came from it."""
        agents = self.job.living()
        found = [
            (agent, seen)
            for agent in agents
            for seen in children(agent.process.pid)
            if ZYGOTE in seen.command
        ]
        if not found:
            return None
        agent, seen = self.rng.choice(found)
        for pid in (seen.pid, *(child.pid for child in children(seen.pid))):
            self.note("a template is killed", agent=agent.name, pid=pid, code=137)
        send(seen.pid, signal.SIGKILL)
        return f"{seen.pid} of {agent.name}"

    # The place

    def kill_place(self) -> str | None:
        if not self.job.place.kill():
            return None
        self.note("the store is killed")
        self.later(self.rng.choice((0.0, 0.1, 0.5, 2.0)), self.job.place.mend)
        return "the place"

    def freeze_place(self) -> str | None:
        if not self.job.place.freeze():
            return None
        self.note("the store is frozen")
        self.later(self.rng.choice((0.2, 1.0, 2.0)), self.job.place.mend)
        return "the place"


KINDS: dict[str, tuple[int, Callable[[Faults], str | None]]] = {
    "kill worker": (6, lambda do: do.signal_worker(signal.SIGKILL)),
    "terminate worker": (2, lambda do: do.signal_worker(signal.SIGTERM)),
    "freeze worker": (2, Faults.freeze_worker),
    "worker exits 0": (1, lambda do: do.order("exit 0", 0)),
    "worker exits 3": (2, lambda do: do.order("exit 3", 3)),
    "worker raises": (2, lambda do: do.order("raise", 1)),
    "worker forks": (2, lambda do: do.order("fork", None)),
    "worker forks and exits 3": (2, lambda do: do.order("fork and exit 3", 3)),
    "worker floods": (2, lambda do: do.order("flood", None)),
    "worker closes stdout": (1, lambda do: do.order("close", None)),
    "worker ignores SIGTERM": (1, lambda do: do.order("deaf", None)),
    "kill agent": (5, Faults.kill_agent),
    "terminate agent": (3, lambda do: do.end_agent(signal.SIGTERM)),
    "interrupt agent": (0, lambda do: do.end_agent(signal.SIGINT)),  # ends the job: a fault for the end
    "freeze agent": (2, Faults.freeze_agent),
    "new agent": (8, Faults.new_agent),
    "kill template": (1, Faults.kill_template),
    "kill store": (4, Faults.kill_place),
    "freeze store": (2, Faults.freeze_place),
}
