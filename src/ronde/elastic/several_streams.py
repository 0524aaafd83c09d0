"""Batches from several streams, such as one for each file, each of which one rank reads: `State.streams`.

1. A batch takes equal numbers of samples from all streams that have not ended. What a stream lacks comes from the
   others, so only the last batch is smaller. So batches follow from the streams and `global_batch` alone.
2. Each stream has one reader among the ranks (`deal`). When a rank's streams have ended, it takes over one from a rank
   that has two more.
3. Ranks tell each other how many samples they have read of each stream. So each rank knows, and commits, the positions
   in all streams, and any rank of the next world can go on with any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.comm import world as comm
from ronde.elastic.batches import Position, Positions, check_source, open_source, share_of
from ronde.errors import MismatchError, UsageError

__all__ = ["SeveralStreams", "deal"]

Source = Callable[[int], Iterable[Any]] | Iterable[Any]


class SeveralStreams:
    """See `State.streams`."""

    def __init__(self, positions: Positions, sources: Sequence[Source], global_batch: int, name: str) -> None:
        if not isinstance(sources, Sequence) or isinstance(sources, str) or not sources:
            raise UsageError("streams() needs a list of one stream or more")
        for source in sources:
            check_source(source, global_batch)
        self._sources, self._batch = sources, global_batch
        self._positions, self._keys = positions, [f"{name}#{number}" for number in range(len(sources))]
        self._open: dict[int, Iterator[Any]] = {}  # the streams that this rank reads
        self._readers: dict[int, int] = {}

    def __iter__(self) -> Iterator[list[Any]]:
        self._check_count()
        now = [self._positions.live.get(key, Position()) for key in self._keys]
        taken, ended = [each.step for each in now], {n for n, each in enumerate(now) if each.epoch}
        while True:
            before = sum(taken)
            samples = self._read_batch(taken, ended)
            # Before the step, so that a commit in it has the next one.
            self._positions.live.update(
                {key: Position(int(n in ended), taken[n]) for n, key in enumerate(self._keys)}
            )
            if sum(taken) == before:
                return
            yield samples

    def _check_count(self) -> None:
        counts = comm.world().allgather(np.array([len(self._sources), self._batch], np.int64)).reshape(-1, 2)
        if len(set(map(tuple, counts.tolist()))) > 1:
            found = "; ".join(f"rank {rank}: {count}, {batch}" for rank, (count, batch) in enumerate(counts))
            raise MismatchError(
                f"all ranks must give streams() the same streams and global_batch, but these differ: {found}"
            )

    def _read_batch(self, taken: list[int], ended: set[int]) -> list[Any]:
        """Return this rank's samples of the next batch; bring the positions in all streams up to date."""
        samples: list[Any] = []
        missing = self._batch
        while missing and len(ended) < len(self._sources):
            left = [n for n in range(len(self._sources)) if n not in ended]
            self._readers = deal(left, self._readers, comm.size())
            wanted = _equal_numbers(left, missing, first=sum(taken) // self._batch)
            counts = np.zeros(len(self._sources), np.int64)
            for number in left:
                if self._readers[number] == comm.rank():
                    found = self._read(number, taken[number], wanted[number])
                    counts[number] = len(found)
                    samples += found
                else:
                    self._open.pop(number, None)
            counts = comm.world().allreduce(counts)
            for number in left:
                taken[number] += int(counts[number])
                if counts[number] < wanted[number]:
                    ended.add(number)
                    self._open.pop(number, None)
            missing -= int(counts.sum())
        return samples

    def _read(self, number: int, start: int, count: int) -> list[Any]:
        if number not in self._open:
            self._open[number] = open_source(self._sources[number], start)
        return list(itertools.islice(self._open[number], count))


def deal(streams: Sequence[int], readers: Mapping[int, int], size: int) -> dict[int, int]:
    """Return the rank that reads each stream: the present reader, unless another rank has two streams less.

    `streams`: those that have not ended, in order; `readers`: present ones, in a world of `size` ranks.
    """
    dealt: dict[int, list[int]] = {rank: [] for rank in range(size)}
    for number in streams:
        dealt[readers.get(number, number % size)].append(number)
    while True:
        most = max(range(size), key=lambda rank: len(dealt[rank]))
        least = min(range(size), key=lambda rank: len(dealt[rank]))
        if len(dealt[most]) < len(dealt[least]) + 2:
            return {number: rank for rank, numbers in dealt.items() for number in numbers}
        dealt[least].append(dealt[most].pop())


def _equal_numbers(streams: Sequence[int], total: int, first: int) -> dict[int, int]:
    """Return how many of `total` samples each stream gives. `first`: where larger numbers begin, modulo the streams."""
    count = len(streams)
    shares = [share_of(total, place, count) for place in range(count)]
    return {streams[(first + place) % count]: share.stop - share.start for place, share in enumerate(shares)}
