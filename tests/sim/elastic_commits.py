"""Simulates ranks that train, commit, die at any moment, go back to a commit together, and take in new ranks.

The state of a rank is a number: how many steps it has made. The state of commit k is k. A rank in the middle of a step
has a *torn* state, which is that of no commit. A step and a barrier end on a rank after all ranks of its world have
come to it; after a death each rank may see the end or the failure.

python -m tests.sim.elastic_commits --seeds 100000        # stops at the first one that fails
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from tests.sim import command

from ronde.elastic.commit_protocol import NOTHING, Action, Decision, Standing, decide

TORN = -100

Decide = Callable[[Sequence[Standing]], Decision]


class Phase(Enum):
    STEP = "at the beginning of a step"
    IN_STEP = "waits in a step"
    BARRIER = "waits at the barrier of a commit"
    COPY = "has passed the barrier"


class BrokenError(AssertionError):
    """The protocol has broken a promise."""


@dataclass(eq=False)
class Rank:
    """One process. `step`: the step or commit at which it is."""

    live: int = TORN
    copy: int = TORN
    standing: Standing = field(default_factory=Standing)
    phase: Phase = Phase.STEP
    step: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """How far it has come: a rank waits until all have come at least as far."""
        return self.step, int(self.phase in (Phase.STEP, Phase.IN_STEP))  # commit k, then step k


@dataclass
class Bugs:
    """Mistakes that a check must notice."""

    copies_before_barrier: bool = False
    keeps_point: bool = False  # after it has passed the barrier
    forgets_point: bool = False  # while it waits, so that it cannot copy later
    decide: Decide = decide


class Training:
    """One job. `size`: how many ranks it has at first, and at most."""

    def __init__(self, seed: int, size: int, bugs: Bugs | None = None, deaths: int = 6) -> None:
        self._random = Random(seed)
        self._size = size
        self._bugs = bugs or Bugs()
        self._deaths = deaths
        self.recoveries = 0
        self.events: deque[tuple[object, ...]] = deque(maxlen=30)
        self.ranks = [Rank(live=0) for _ in range(size)]
        self._behind: Rank | None = (
            None  # for whom the others waited last: of 1,000 ranks mostly the same one
        )
        self._form_world()

    def run(self, steps: int = 12) -> Counter[str]:
        """Train until all ranks have made so many commits, or all are dead; return what has happened."""
        while self.ranks and any(rank.standing.copied < steps for rank in self.ranks):
            if self._deaths and self._random.random() < 0.02:
                self._lose()
            elif self._random.random() < 0.005:
                self._change_members()
            else:
                self._advance(self._random.choice(self.ranks))
        return Counter(recoveries=self.recoveries, finished=bool(self.ranks))

    # Training

    def _advance(self, rank: Rank, has_failed: bool = False) -> bool:
        """Let a rank do its next thing; return False if it waits. `has_failed`: its world may fail instead."""
        match rank.phase:
            case Phase.STEP:
                rank.live, rank.phase = TORN, Phase.IN_STEP
            case Phase.IN_STEP:
                if not self._all_came((rank.step, 1), Phase.IN_STEP) or (
                    has_failed and self._random.random() < 0.5
                ):
                    return False
                rank.live, rank.phase = rank.step + 1, Phase.BARRIER
                rank.step += 1
                point = NOTHING if self._bugs.forgets_point else rank.step
                rank.standing = rank.standing._replace(point=point)
                if self._bugs.copies_before_barrier:
                    self._copy(rank)
            case Phase.BARRIER:
                if not self._all_came((rank.step, 0), Phase.BARRIER) or (
                    has_failed and self._random.random() < 0.5
                ):
                    return False
                rank.phase = Phase.COPY
            case Phase.COPY:
                self._copy(rank)
                rank.phase = Phase.STEP
        return True

    def _copy(self, rank: Rank) -> None:
        rank.copy = rank.live
        point = rank.step if self._bugs.keeps_point else NOTHING
        rank.standing = Standing(rank.step, point)

    def _all_came(self, place: tuple[int, int], phase: Phase) -> bool:
        if self._behind is not None and not _has_come(self._behind, place, phase):
            return False
        self._behind = next((rank for rank in self._members if not _has_come(rank, place, phase)), None)
        return self._behind is None

    # Losses

    def _lose(self) -> None:
        """Some ranks die. Each of the others sees it, now or a little later."""
        count = min(self._random.choice((1, 1, 1, 2)), len(self.ranks))
        self._deaths -= 1
        for rank in self._random.sample(self.ranks, count):
            self.ranks.remove(rank)
        for rank in self.ranks:
            while rank.phase is Phase.COPY or (
                self._random.random() < 0.9 and self._advance(rank, has_failed=True)
            ):
                if rank.phase is Phase.COPY:
                    self._advance(rank)
        self.recoveries += 1
        self._form_world(is_loss=True)

    def _change_members(self) -> None:
        """All ranks come to a commit; there new ones join, or one leaves."""
        target = max(rank.step for rank in self.ranks) + 1
        while any(rank.standing.copied < target for rank in self.ranks):
            rank = self._random.choice(self.ranks)
            if rank.standing.copied < target:
                self._advance(rank)
        if len(self.ranks) > 1 and self._random.random() < 0.3:
            self.ranks.remove(self._random.choice(self.ranks))
        self._form_world()

    def _form_world(self, is_loss: bool = False) -> None:
        """Agree on a commit, go there, and give it to new ranks; ranks may die at any moment of that."""
        while self.ranks:
            if len(self.ranks) < self._size and self._random.random() < 0.5:
                self.ranks.insert(self._random.randint(0, len(self.ranks)), Rank())
            self._members, self._behind = list(self.ranks), None
            decision = self._bugs.decide([rank.standing for rank in self.ranks])
            self._check_decision(decision)
            actions = list(zip(self.ranks, decision.actions))
            self._random.shuffle(actions)
            dies_after = (
                self._random.randrange(len(actions)) if self._random.random() < 0.2 and self._deaths else -1
            )
            for done, (rank, action) in enumerate(actions):
                self._perform(rank, action, decision.number)
                if done == dies_after:
                    break
            if dies_after >= 0:
                self._deaths -= 1
                self.ranks.remove(self._random.choice(self.ranks))
                continue
            self._sync(decision)
            return

    def _perform(self, rank: Rank, action: Action, number: int) -> None:
        if action is Action.RESTORE:
            rank.live = rank.copy
        elif action is Action.SAVE:
            rank.copy = rank.live
        else:
            rank.standing = Standing()
            return
        rank.standing, rank.step, rank.phase = Standing(number), number, Phase.STEP

    def _sync(self, decision: Decision) -> None:
        root = self.ranks[decision.holders[0]]
        if decision.actions[0] is Action.BEGIN:
            root.live = root.copy = 0
        for rank in self.ranks:
            if rank.standing.copied != decision.number:
                rank.live = rank.copy = root.copy
            rank.standing, rank.step, rank.phase = Standing(decision.number), decision.number, Phase.STEP
            if (rank.live, rank.copy) != (decision.number, decision.number):
                raise BrokenError(
                    f"a rank has state {rank.live} and copy {rank.copy} at commit {decision.number}"
                )

    def _check_decision(self, decision: Decision) -> None:
        self.events.append((*(tuple(rank.standing) for rank in self.ranks), "go to", decision.number))
        survivors = [rank for rank in self.ranks if rank.standing != Standing()]
        if not survivors:
            return
        newest = max(rank.standing.copied for rank in survivors)
        if decision.number < newest:
            raise BrokenError(f"commit {newest} of a survivor is taken back to {decision.number}")
        if decision.number > max(rank.live for rank in survivors) and decision.number > newest:
            raise BrokenError(f"no survivor has made {decision.number} steps")


def _has_come(rank: Rank, place: tuple[int, int], phase: Phase) -> bool:
    return rank.place > place or (rank.place == place and rank.phase in (phase, Phase.COPY))


def simulate(seed: int, ranks: int) -> Counter[str]:
    """Do one simulation; raises Broken with the last events."""
    return command.run(Training(seed, ranks), f"tests.sim.elastic_commits --seed {seed} --ranks {ranks}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command.main(argv, __doc__ or "", "ranks", simulate, lambda seed: 2 + seed % 7)


if __name__ == "__main__":
    sys.exit(main())
