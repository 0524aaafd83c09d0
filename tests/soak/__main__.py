"""Random faults for real jobs on this machine, by seeds: agents, workers, stores, and a schedule of faults.

    python -m tests.soak --minutes 60           # seed after seed, until one fails
    python -m tests.soak --seed 7               # that one only; its folder stays if it fails
    python -m tests.soak --seeds 20 --place etcd --work gloo

A seed determines the shape of the job, the faults and the pauses between them. The victims and the exact moments depend
on the machine, so a failing seed may need several runs to fail again. After the faults the driver repairs everything;
then the job must gather all its agents in one round, and end. `checks.py` has the invariants.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.soak import checks, places
from tests.soak.faults import KINDS, Faults
from tests.soak.job import Job, Shape, is_alive, marked, send

SETTLE_S = 90  # in which all agents that live must work in one round, after all is mended
END_S = 60  # in which they must end after that
SLOW_S = 8  # after which that is worth a look
PAUSE_S = 0.01


class Soak:
    """One run."""

    def __init__(self, seed: int, shape: Shape, folder: Path) -> None:
        self.rng = random.Random(f"schedule {seed}")
        self.shape = shape
        self.events: list[str] = []
        self.began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0  # how long it took until all was well
        self.job = Job(shape, places.make(shape.place, folder), folder, f"{seed}.{os.getpid()}")
        self.faults = Faults(self.job, self.rng)

    def run(self) -> list[str]:
        """Run it; returns what was wrong."""
        try:
            for _ in range(self.rng.randint(self.shape.least, self.shape.most)):
                self.tell("starts", self.job.start().name)
            self.pass_time(self.rng.choice((0.0, 0.3, 1.0, 2.0)))
            for _ in range(self.rng.randint(2, 12)):
                self.strike()
            return self.finish() or list(self.check())
        finally:
            self.clean()

    def tell(self, *words: object) -> None:
        self.events.append(f"{time.monotonic() - self.began:7.3f} {' '.join(map(str, words))}")

    def strike(self) -> None:
        names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
        for name in self.rng.choices(names, weights, k=self.rng.choice((1, 1, 1, 2, 3))):
            if whom := self.faults.strike(name):
                self.tell(name, whom)
                self.counts[name] += 1
        if self.rng.random() < 0.4:  # the next one is to strike when a round begins
            rounds = len(checks.rounds_of(self.job))
            self.until(lambda: len(checks.rounds_of(self.job)) > rounds, 2.0)
        self.pass_time(self.rng.choice((0.0, 0.02, 0.1, 0.3, 1.0)) * self.rng.random())

    def pass_time(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self.faults.mend()
            time.sleep(min(PAUSE_S, until - now))

    def until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                return False
            self.pass_time(PAUSE_S)
        return True

    def finish(self) -> list[str]:
        """Mend everything, gather, and end. Returns why that is not possible."""
        job = self.job
        self.faults.mend(everything=True)
        job.place.mend()
        mended = time.monotonic()
        if self.rng.random() < 0.1:
            self.tell("interrupt agent", self.faults.strike("interrupt agent"))
        if not self.until(self.is_gathered, SETTLE_S):
            return [f"the agents that live are not in one round after {SETTLE_S} s: {self.where()}"]
        self.tell("gathered:", self.where())
        self.slowest = time.monotonic() - mended
        if wrong := list(checks.check_descriptors(job)):
            return wrong
        (job.folder / "done").touch()
        if not self.until(self.is_over, END_S):
            return [f"still there {END_S} s after all was done: {[agent.name for agent in job.living()]}"]
        self.tell("ended:", {agent.name: agent.process.returncode for agent in job.agents})
        return []

    def is_gathered(self) -> bool:
        """Whether all that live have workers in the last round who work, or they are about to end."""
        self.faults.mend()
        while 0 < len(self.job.living()) < self.shape.least:  # those who are left wait for others
            self.tell("starts", self.job.start().name)
        if any(agent.got(signal.SIGTERM, signal.SIGINT) for agent in self.job.living()):
            return False  # it has yet to go, and then others may be too few
        agents = {agent.name for agent in self.job.living()}
        rounds = checks.rounds_of(self.job)
        moment = time.monotonic() - 1
        if rounds and any(worker.has_succeeded for worker in rounds[-1]):
            return True  # who comes now is not let in any more
        return (
            agents <= {worker.agent for worker in rounds[-1] if worker.works(moment)}
            if rounds
            else not agents
        )

    def is_over(self) -> bool:
        """Whether nobody lives; who came when the job was over, and waits for others, is told to go."""
        living = self.job.living()
        has_worked = {worker.agent for worker in self.job.workers()}
        if not any(agent.name in has_worked for agent in living):
            for agent in living:
                if not agent.got(signal.SIGTERM):
                    agent.signal(signal.SIGTERM)
        return not living

    def where(self) -> dict[str, list[int]]:
        """The rounds of the workers that live, by their agents."""
        found: dict[str, list[int]] = {agent.name: [] for agent in self.job.living()}
        for worker in self.job.workers():
            if is_alive(worker.pid):
                found.setdefault(worker.agent, []).append(worker.number)
        return found

    def check(self) -> Iterator[str]:
        job, faults = self.job, self.faults
        yield from checks.check_ranks(job)
        yield from checks.check_survivors(job)
        yield from checks.check_one_at_a_time(job, faults)
        yield from checks.check_restarts(job, faults)
        yield from checks.check_exit_codes(job, faults)
        yield from checks.check_logs(job)
        yield from checks.check_kills(faults)
        yield from checks.check_remains(job)

    def clean(self) -> None:
        """Let nothing be left, whatever has gone wrong."""
        for agent in self.job.agents:
            agent.process.kill()
            agent.process.wait()
        for seen in marked(self.job.mark):
            send(seen.pid, signal.SIGKILL)
        self.job.place.close()

    def story(self) -> str:
        texts = [
            f"--- {agent.name} ({agent.process.returncode})\n{agent.text('err')}" for agent in self.job.agents
        ]
        return "\n".join([repr(self.shape), *self.events, *texts])


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system without much room, mounted there."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "none"]
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def soak(seed: int, place_kinds: tuple[str, ...], works: tuple[str, ...]) -> tuple[str, Counter[str]]:
    """Run one seed. Returns what was wrong, with all that helps to understand it, and what befell the job."""
    shape = Shape.draw(random.Random(f"shape {seed}"), place_kinds, works)
    folder = Path(tempfile.mkdtemp(prefix=f"ronde-soak-{seed}-"))
    shared_memory = set(os.listdir("/dev/shm"))
    run = None
    try:
        if shape.full_disk and os.geteuid() == 0:
            with small_disk(folder / "logs"):
                run = Soak(seed, shape, folder)
                problems = run.run()
        else:
            run = Soak(seed, shape, folder)
            problems = run.run()
        if left := set(os.listdir("/dev/shm")) - shared_memory:
            problems.append(f"left in /dev/shm: {left}")
        if run.slowest > SLOW_S:
            print(
                f"seed {seed}: it took {run.slowest:.1f} s until all was well",
                run.story(),
                sep="\n",
                flush=True,
            )
        if not problems:
            return "", run.counts
        return "\n".join([f"seed {seed} in {folder}", run.story(), "--- wrong:", *problems]), run.counts
    finally:
        if run and not problems:
            shutil.rmtree(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random faults for real jobs.", prog="python -m tests.soak")
    parser.add_argument("--seed", type=int, help="only this one, or the first one")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--minutes", type=float, help="for how long")
    parser.add_argument("--place", choices=places.KINDS, help="where to meet (default: each)")
    parser.add_argument(
        "--work", choices=("alone", "ronde", "gloo"), help="what workers do (default: the first two)"
    )
    parser.add_argument("--go-on", action="store_true", help="also after a seed that has failed")
    asked = parser.parse_args(argv)
    os.environ.setdefault("RONDE_JOB_KEY", os.urandom(32).hex())
    kinds = (asked.place,) if asked.place else tuple(kind for kind in places.KINDS if has(kind))
    works = (asked.work,) if asked.work else ("alone", "alone", "ronde")
    only = asked.seed is not None and asked.seeds is None and asked.minutes is None
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else None
    most = 1 if only else asked.seeds
    counts: Counter[str] = Counter()
    failed: list[int] = []
    seed = first = asked.seed or 0
    while (most is None or seed < first + most) and (end is None or time.monotonic() < end):
        wrong, befell = soak(seed, kinds, works)
        counts += befell
        if wrong:
            failed.append(seed)
            print(wrong, flush=True)
            if not asked.go_on:
                break
        seed += 1
    print(
        f"seeds {first} to {seed}, failed: {failed or 'none'};",
        ", ".join(f"{n} {k}" for k, n in counts.items()),
    )
    return 1 if failed else 0


def has(kind: str) -> bool:
    return kind != "etcd" or shutil.which("etcd") is not None


if __name__ == "__main__":
    sys.exit(main())
