"""What the facts of a job under chaos must add up to: steps, samples, ranks, survivors, resources. Pure.

`Facts` are the lines of one process (chaos_training.py); each check yields its findings as sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Fact = Mapping[str, Any]

FIRST_WORLDS = 3  # in which a process has yet to open and allocate what it keeps
MORE_DESCRIPTORS = 4  # of the last worlds of a process, compared with its first ones
MORE_MEMORY_KIB = 30_000


@dataclass(frozen=True)
class Entry:
    """A process enters a world."""

    pid: int
    at: int
    rank: int
    size: int
    step: int
    fact: Fact


@dataclass
class World:
    """One world: the processes that entered it, and per step which samples they took."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    samples: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)  # step -> (pid, samples)
    done: dict[int, set[int]] = field(default_factory=dict)  # step -> processes that have done it
    committed: Counter[int] = field(default_factory=Counter)

    @property
    def began(self) -> int:
        """The time of the first entry."""
        return min(entry.at for entry in self.entries)

    @property
    def pids(self) -> set[int]:
        """The processes in it."""
        return {entry.pid for entry in self.entries}


def worlds_of(processes: Mapping[int, Sequence[Fact]]) -> list[World]:
    """Return the worlds of a job by the time at which they began, from the facts of each process."""
    worlds: dict[str, World] = {}
    for pid, facts in processes.items():
        for fact in facts:
            if "round" not in fact:
                continue
            world = worlds.setdefault(fact["round"], World(fact["round"]))
            match fact["what"]:
                case "enters":
                    entry = Entry(pid, fact["at"], fact["rank"], fact["size"], fact["step"], fact)
                    world.entries.append(entry)
                case "samples":
                    world.samples.setdefault(fact["step"], []).append((pid, fact["samples"]))
                case "step":
                    world.done.setdefault(fact["step"], set()).add(pid)
                case "commits":
                    world.committed[fact["step"]] += 1
    return sorted(worlds.values(), key=lambda world: world.began)


def check_ranks(worlds: Sequence[World]) -> Iterator[str]:
    """All processes of a world agree on its size and on the step at which it begins, and have different ranks."""
    for number, world in enumerate(worlds):
        sizes = {entry.size for entry in world.entries}
        steps = {entry.step for entry in world.entries}
        ranks = [entry.rank for entry in world.entries]
        if len(sizes) > 1 or len(steps) > 1:
            yield f"world {number}: its processes see sizes {sizes} and begin at steps {steps}"
        if len(set(ranks)) < len(ranks) or max(ranks) >= max(sizes):
            yield f"world {number}: ranks {sorted(ranks)} of {sizes}"


def check_samples(
    worlds: Sequence[World], steps: int, batch_of: Callable[[int], Sequence[int]], victims: set[int]
) -> Iterator[str]:
    """The last world that has begun a step has taken each sample of its batch exactly once; no step is missing.

    A victim may die when it has done a step, before it can say so.
    """
    for step in range(steps):
        attempts = [world for world in worlds if step in world.samples]
        if not attempts:
            yield f"step {step}: no world has done it"
            continue
        taken = [sample for _, samples in attempts[-1].samples[step] for sample in samples]
        expected = Counter(batch_of(step))
        if Counter(taken) != expected:
            missing, more = expected - Counter(taken), Counter(taken) - expected
            yield (
                f"step {step}: {missing.total()} samples are missing, {more.total()} were taken too often:"
                f" {attempts[-1].samples[step]}"
            )
        if behind := attempts[-1].pids - victims - attempts[-1].done.get(step, set()):
            yield f"step {step}: processes {sorted(behind)} have not done it"


def check_rollbacks(worlds: Sequence[World]) -> Iterator[str]:
    """No world begins before a commit that one of its members has seen done, or after the steps that were done."""
    newest: dict[int, int] = {}  # of each process, the newest commit that it has seen done
    furthest = 0
    for number, world in enumerate(worlds):
        begins = world.entries[0].step
        known = max((newest.get(pid, 0) for pid in world.pids), default=0)
        if begins < known:
            yield f"world {number} begins at step {begins}: commit {known} is lost"
        if begins > furthest:
            yield f"world {number} begins at step {begins}: only {furthest} steps were done"
        furthest = max([furthest, *(step + 1 for step in world.done)])
        commits = max(world.committed, default=0)
        for pid in world.pids:
            newest[pid] = max(newest.get(pid, 0), begins, commits if commits else 0)


def check_survivors(worlds: Sequence[World], victims: set[int], ended: set[int]) -> Iterator[str]:
    """Each process that no fault has ended is in all worlds from its first one, and ends well."""
    for number, world in enumerate(worlds):
        for pid in sorted(world.pids - victims):
            later = [later.pids for later in worlds[number + 1 : number + 2]]
            if pid not in ended or any(pid not in pids for pids in later):
                yield f"process {pid} of world {number} has not survived, and no fault was its own"
                return


def check_resources(worlds: Sequence[World]) -> Iterator[str]:
    """Processes that live for many worlds do not use more and more descriptors or memory."""
    lives: dict[int, list[Fact]] = {}
    for world in worlds:
        for entry in world.entries:
            lives.setdefault(entry.pid, []).append(entry.fact)
    for pid, facts in lives.items():
        settled, last = facts[FIRST_WORLDS:], facts[-FIRST_WORLDS:]
        if len(settled) <= FIRST_WORLDS:
            continue
        for what, more in (
            ("descriptors", MORE_DESCRIPTORS),
            ("threads", 2),
            ("memory_kib", MORE_MEMORY_KIB),
        ):
            # A new size of the world needs more or fewer connections, so the largest early value counts.
            before = max(fact[what] for fact in settled[: max(1, len(settled) // 2)])
            now = min(fact[what] for fact in last)
            if now > before + more:
                yield f"process {pid}: {what} grew from {before} to {now} in {len(facts)} worlds"


def check_losses(processes: Mapping[int, Sequence[Fact]], expected: Mapping[int, int]) -> Iterator[str]:
    """In the last attempt at a step, its loss has the bits of the undisturbed run. `expected`: by step."""
    last: dict[int, tuple[int, int]] = {}
    for facts in processes.values():
        for fact in facts:
            if fact["what"] == "step":
                last[fact["step"]] = max(last.get(fact["step"], (0, 0)), (fact["at"], fact["loss"]))
    for step, loss in expected.items():
        if step in last and last[step][1] != loss:
            yield f"step {step}: the loss differs from that of the undisturbed run"
            return
