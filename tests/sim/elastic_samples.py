"""Simulates which samples ranks get while the size of their world changes: `State.batches`, and `State.stream`.

Ranks make steps and commits together. Some are lost, the others go back to the commit, and new ranks get its positions.
What the steps that counted have seen, batch by batch, must be what a single rank sees that is never disturbed.

python -m tests.sim.elastic_samples --seeds 100000        # stops at the first one that fails
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.sim import command
from tests.sim.common_order import require

from ronde.elastic import batches
from ronde.elastic.batches import Batches, Positions, StreamBatches

Batch = list[int]


class World:
    """Answers the rank whose turn it is."""

    def __init__(self) -> None:
        self.turn, self.count = 0, 1

    def rank(self) -> int:
        return self.turn

    def size(self) -> int:
        return self.count


class Member:
    """One process."""

    def __init__(self) -> None:
        self.positions = Positions()
        self.samples: Iterator[Any] = iter(())


class Samples:
    """One job. `ranks`: how many it has at first, and at most."""

    def __init__(self, seed: int, ranks: int) -> None:
        self._random = choose = Random(seed)
        self._ranks = ranks
        self._world = World()
        self._batch = choose.randint(1, 2 * ranks)
        self._count = choose.randint(1, 12 * self._batch)
        self._epochs = choose.randint(1, 3)
        self._order = choose.choice((None, 0, seed))
        self._micro = choose.choice((None, None, choose.randint(1, self._batch)))
        self._is_stream = choose.random() < 0.3
        self._opens = choose.random() < 0.5
        self._faults = choose.choice((0, 1, 3, 10))
        self.events: deque[tuple[object, ...]] = deque(maxlen=30)
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Train to the end; raises Broken."""
        with patch.object(batches, "comm", self._world):
            undisturbed = self._train(1, faults=0)
            self._check_epochs(undisturbed)
            seen = self._train(self._ranks, self._faults)
        require(seen == undisturbed, "the steps that counted have seen", seen, "instead of", undisturbed)
        return self.counts

    def _check_epochs(self, seen: list[Batch]) -> None:
        samples = Counter(sample for batch in seen for sample in batch)
        times = 1 if self._is_stream else self._epochs
        require(samples == Counter(dict.fromkeys(range(self._count), times)), "samples", samples)

    def _train(self, ranks: int, faults: int) -> list[Batch]:
        """Return the batches of all steps that counted."""
        choose = self._random
        members = [Member() for _ in range(ranks)]
        final: list[Batch] = []
        since: list[Batch] = []
        self._begin(members)
        while (batch := self._step(members)) is not None:
            since.append(batch)
            if faults and choose.random() < 0.15:
                faults -= 1
                since = []
                members = self._lose(members, choose.choice((0, 1, 1, len(members) // 2)))
            elif choose.random() < 0.5:
                final, since = final + since, []
                for member in members:
                    member.positions.save()
                if faults and choose.random() < 0.1:
                    members = self._lose(members, choose.choice((0, 1)))
        return final + since

    def _step(self, members: list[Member]) -> Batch | None:
        """Return the samples of a step in the order of the ranks; None at the end, which all must see."""
        shares = []
        for self._world.turn, member in enumerate(members):
            share = next(member.samples, None)
            shares.append(share if share is None else [int(each) for each in self._flat(share)])
        if None in shares:
            require(shares == [None] * len(members), "some ranks have come to the end:", shares)
            return None
        sizes = [len(share) for share in shares if share is not None]
        if self._micro is None or self._is_stream:
            require(max(sizes) - min(sizes) <= 1, "shares differ:", sizes)
        return [sample for share in shares if share is not None for sample in share]

    def _flat(self, share: Any) -> Any:
        if self._micro is None or self._is_stream:
            return share
        return np.concatenate([np.array([], int), *share])

    def _lose(self, members: list[Member], count: int) -> list[Member]:
        """Lose ranks, add new ones, and go back to the commit."""
        choose = self._random
        members = choose.sample(members, max(len(members) - count, 1))
        self.counts["recoveries"] += 1
        for member in members:
            member.positions.restore()
        payload = members[0].positions.payload()
        for _ in range(choose.randint(0, self._ranks - len(members))):
            new = Member()
            new.positions.load(payload)
            members.insert(choose.randint(0, len(members)), new)
        self.events.append(("a world of", len(members), "begins at", payload))
        self._begin(members)
        return members

    def _begin(self, members: Sequence[Member]) -> None:
        self._world.count = len(members)
        for member in members:
            member.samples = iter(self._make(member.positions))

    def _make(self, positions: Positions) -> Any:
        if not self._is_stream:
            arguments = self._batch, self._order, self._epochs, self._micro
            return Batches(positions, self._count, *arguments, "batches")
        samples = range(self._count)
        source = (lambda start: iter(samples[start:])) if self._opens else samples
        return StreamBatches(positions, source, self._batch, "stream")


def simulate(seed: int, ranks: int) -> Counter[str]:
    """Do one simulation; raises Broken with how to do it again."""
    return command.run(Samples(seed, ranks), f"tests.sim.elastic_samples --seed {seed} --ranks {ranks}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command.main(argv, __doc__ or "", "ranks", simulate, lambda seed: 2 + seed % 7)


if __name__ == "__main__":
    sys.exit(main())
