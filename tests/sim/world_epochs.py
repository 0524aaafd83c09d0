"""Many ranks come to epochs in every order: fresh processes, some that raise, die, wait too long or come late.

A process is a generator that does one request to the store at a time; a seed chooses whose turn it is. While faults
last, every attempt may end; afterwards all ranks must form one world. At all times, all ranks must read the same
outcome of each stage of an epoch. In half of the runs, the store begins anew with each process of rank 0.

python -m tests.sim.world_epochs --seeds 100000        # stops at the first one that fails
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.sim import command
from tests.sim.common_order import Broken

from ronde.comm.world_epochs import (
    Add,
    CompareSet,
    Ending,
    EndingKind,
    Epoch,
    MultiGet,
    Reaction,
    Request,
    SetValue,
    WorldKeys,
    come_to_epoch,
    end_epoch,
    judge_ending,
    put_record,
    read_outcome,
)

STEPS_OF_FAULTS = 200
MOST_STEPS = 20_000


@dataclass(frozen=True)
class Look:
    """Ask for a key's value, None if it has none."""

    key: str


class StoreIsNewError(Exception):
    """The store has begun anew, without the keys that are asked for."""


class Process:
    """One process of a rank, which calls `init` until it has formed a world, and after that again at times."""

    def __init__(self, sim: Simulation, rank: int, number: int) -> None:
        self.sim = sim
        self.rank = rank
        self.number = number
        self.attempts = 0
        self.last: Epoch | None = None
        self.has_formed = False
        self.is_done = False
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.work = self._run()
        self.answer: object = None

    def _run(self) -> Generator[Request | Look, Any, None]:
        while True:
            yield from self._attempt()

    def _attempt(self) -> Generator[Request | Look, Any, None]:
        sim, keys = self.sim, self.sim.keys
        self.attempts += 1
        me = f"{self.number}.{self.attempts}".encode()
        self.last = epoch = yield from come_to_epoch(
            keys, self.rank, me, self.last, f"{self.number}x{self.attempts}", self.has_formed
        )
        self.has_formed = False
        patience = sim.choose.randrange(2, 60) if sim.has_faults else 10**9
        for stage in range(2):
            outcome = yield from put_record(keys, epoch, stage, self.rank, me, b",".join)
            while outcome is None:
                outcome = yield Look(keys.outcome(epoch, stage))
                if not (yield from self._is_same_store(epoch)):
                    return
                patience -= 1
                if outcome is None and patience < 0:
                    missing = tuple(
                        rank
                        for rank in range(keys.size)
                        if keys.record(epoch, stage, rank) not in sim.content
                    )
                    how = EndingKind.TIMED_OUT if missing else EndingKind.FAILED
                    late = missing if stage == 0 else ()
                    ending = Ending(how, self.rank, "", missing, late=late)
                    yield from self._end(epoch, stage, ending)
                    return
            sim.note_outcome(keys.outcome(epoch, stage), outcome)
            found = read_outcome(outcome)
            if isinstance(found, Ending):
                yield from self._judge(found, epoch)
                return
            assert len(found.split(b",")) == keys.size
            if sim.has_faults and sim.choose.random() < 0.1:
                yield from self._end(epoch, stage + 1, Ending(EndingKind.FAILED, self.rank, ""))
                return
        yield from self._connect(epoch, patience)

    def _end(self, epoch: Epoch, stage: int, ending: Ending) -> Generator[Request | Look, Any, None]:
        """End the epoch, unless the store does not answer, or a signal interrupts that, too."""
        if self.sim.choose.random() < 0.7:
            yield from end_epoch(self.sim.keys, epoch, stage, ending)

    def _connect(self, epoch: Epoch, patience: int) -> Generator[Request | Look, Any, None]:
        """Connect with all other ranks: all of them do, or the epoch ends."""
        sim, keys = self.sim, self.sim.keys
        sim.connected.setdefault(epoch, set()).add(self)
        while len(sim.connected[epoch]) < keys.size or not sim.are_alive(sim.connected[epoch]):
            if not (yield from self._is_same_store(epoch)):
                sim.connected[epoch].discard(self)
                return
            ended = yield Look(keys.outcome(epoch, 2))
            if ended is not None:
                found = read_outcome(ended)
                assert isinstance(found, Ending)
                sim.connected[epoch].discard(self)
                yield from self._judge(found, epoch)
                return
            patience -= 1
            if patience < 0:
                sim.connected[epoch].discard(self)
                yield from self._end(epoch, 2, Ending(EndingKind.FAILED, self.rank, ""))
                return
        self.is_done = self.has_formed = True
        if self.rank == 0:
            sim.delete_before(epoch)
        while self.is_done:
            yield Look(keys.counter)  # the program runs
            if {process.last for process in sim.living.values()} != {epoch}:
                self.is_done = False  # it has lost a rank, and calls `init` again

    def _is_same_store(self, epoch: Epoch) -> Generator[Request | Look, Any, bool]:
        counter = yield Look(self.sim.keys.counter)
        return counter is not None and Epoch.decode(counter).word == epoch.word

    def _judge(self, ending: Ending, epoch: Epoch) -> Generator[Request | Look, Any, None]:
        if judge_ending(ending, self.rank) is Reaction.CONTEST:
            yield from end_epoch(self.sim.keys, epoch.following, 0, Ending(EndingKind.TWICE, self.rank, ""))


class Simulation:
    def __init__(self, seed: int, ranks: int = 0) -> None:
        self.choose = random.Random(seed)
        drawn = self.choose.randrange(2, 6)
        self.keys = WorldKeys(ranks or drawn)
        self.events: deque[tuple[object, ...]] = deque(maxlen=30)
        self.content: dict[str, bytes] = {}
        self.has_faults = True
        self.has_store_of_rank_0 = self.choose.random() < 0.5
        self.started = 0
        self.outcomes: dict[str, bytes] = {}
        self.connected: dict[Epoch, set[Process]] = {}
        self.living: dict[int, Process] = {}
        for rank in range(self.keys.size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a fresh process; an earlier one of this rank is dead."""
        self.started += 1
        self.living[rank] = Process(self, rank, self.started)

    def are_alive(self, processes: set[Process]) -> bool:
        return all(self.living[each.rank] is each for each in processes)

    def delete_before(self, epoch: Epoch) -> None:
        """Delete the keys of earlier epochs, as rank 0 does when all have connected."""
        for earlier in range(epoch.number):
            for key in self.keys.of_epoch(Epoch(epoch.word, earlier)):
                self.content.pop(key, None)

    def note_outcome(self, key: str, outcome: bytes) -> None:
        """Note what a rank has read, which all ranks must read in this store."""
        counter = self.content.get(self.keys.counter)
        if counter is not None and f"/{Epoch.decode(counter).word}-" in key:
            assert self.outcomes.setdefault(key, outcome) == outcome

    def step(self, process: Process) -> None:
        request = process.work.send(process.answer)
        try:
            process.answer = self.answer(request)
        except StoreIsNewError:
            process.begin_attempt()

    def answer(self, request: Request | Look) -> object:
        content = self.content
        match request:
            case Look(key):
                return content.get(key)
            case CompareSet(key, expected, desired):
                if content.get(key, b"") == expected:
                    content[key] = desired
                return content.get(key, b"")
            case SetValue(key, value):
                content[key] = value
                return None
            case Add(key):
                content[key] = b"%d" % (int(content.get(key, b"0")) + 1)
                return int(content[key])
            case MultiGet(keys):
                if not all(key in content for key in keys):
                    raise StoreIsNewError
                return [content[key] for key in keys]

    def run(self) -> Counter[str]:
        """Run to the end; raises Broken, or AssertionError."""
        for _ in range(STEPS_OF_FAULTS):
            rank = self.choose.randrange(self.keys.size)
            if self.choose.random() < 0.03:
                self.start(rank)
                if rank == 0 and self.has_store_of_rank_0:
                    self.content.clear()
                    self.outcomes.clear()
            elif self.living[rank].is_done and self.choose.random() < 0.2:
                self.living[rank].is_done = False  # shutdown, and init again
            else:
                self.step(self.living[rank])
        self.has_faults = False
        self.check_that_all_meet()
        return Counter(epochs=max(process.last.number for process in self.living.values() if process.last))

    def check_that_all_meet(self) -> None:
        for process in self.living.values():
            process.is_done = False
        for _ in range(MOST_STEPS):
            worlds = {process.last for process in self.living.values()}
            if len(worlds) == 1 and all(process.is_done for process in self.living.values()):
                return
            self.step(self.choose.choice(list(self.living.values())))
        raise Broken(f"the ranks have not met: {[(p.last, p.is_done) for p in self.living.values()]}")


def simulate(seed: int, ranks: int) -> Counter[str]:
    """Do one simulation; raises Broken with how to do it again."""
    return command.run(Simulation(seed, ranks), f"tests.sim.world_epochs --seed {seed} --ranks {ranks}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command.main(argv, __doc__ or "", "ranks", simulate, lambda seed: 2 + seed % 4)


if __name__ == "__main__":
    sys.exit(main())
