"""Each sample of several streams is in one committed step, whichever rank reads it."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.comm import world as comm
from ronde.elastic.batches import Position, Positions
from ronde.elastic.several_streams import SeveralStreams, deal

LENGTHS = (11, 0, 3, 17, 5)
BATCH = 4


class World:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._arrays = size, threading.Barrier(size), [np.empty(0)] * size
        self.here = threading.local()

    def allgather(self, array: Any) -> Any:
        self._arrays[self.here.rank] = array.copy()
        self._barrier.wait(60)
        found = np.concatenate(self._arrays)
        self._barrier.wait(60)
        return found

    def allreduce(self, array: Any) -> Any:
        return self.allgather(array).reshape(self.size, -1).sum(0)


class Reader:
    """A stream whose opening shows."""

    opened = 0

    def __iter__(self) -> Any:
        self.opened += 1
        return iter([1])


def stream(number: int) -> Callable[[int], Iterable[tuple[int, int]]]:
    return lambda start: ((number, sample) for sample in range(start, LENGTHS[number]))


SOURCES: list[Any] = [stream(number) for number in range(len(LENGTHS))]
SOURCES[2] = list(stream(2)(0))  # begins with its first sample each time


def train(size: int, steps: int, payload: Any, monkeypatch: Any) -> tuple[list[Any], Any]:
    """Return the batches of so many committed steps in a world, and the payload; then one step is not committed."""
    world, payloads = World(size), [payload] * size
    batches: list[list[Any]] = [[] for _ in range(size)]
    monkeypatch.setattr(comm, "world", lambda: world)
    monkeypatch.setattr(comm, "size", lambda: size)
    monkeypatch.setattr(comm, "rank", lambda: world.here.rank)

    def of_rank(rank: int) -> None:
        world.here.rank = rank
        positions = Positions()
        positions.load(payload)
        for step, samples in enumerate(SeveralStreams(positions, SOURCES, BATCH, "")):
            if step == steps:
                return
            batches[rank].append(samples)
            positions.save()
            payloads[rank] = positions.payload()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(each == payloads[0] for each in payloads)
    return [sorted(itertools.chain(*shares)) for shares in zip(*batches, strict=True)], payloads[0]


def test_worlds_of_several_sizes_make_the_same_batches(monkeypatch: Any) -> None:
    alone, _ = train(1, 99, {}, monkeypatch)
    assert Counter(itertools.chain(*alone)) == Counter(
        (number, sample) for number, length in enumerate(LENGTHS) for sample in range(length)
    )
    assert [len(each) for each in alone] == [BATCH] * (sum(LENGTHS) // BATCH)
    found: list[Any] = []
    payload: Any = {}
    for size, steps in ((3, 2), (2, 3), (4, 99)):
        batches, payload = train(size, steps, payload, monkeypatch)
        found += batches
    assert found == alone
    assert train(3, 1, payload, monkeypatch)[0] == []


def test_a_stream_keeps_its_reader_while_that_is_fair() -> None:
    assert deal(range(5), {}, 2) == {0: 0, 2: 0, 4: 0, 1: 1, 3: 1}
    assert deal([0, 2, 4], {0: 0, 2: 0, 4: 0}, 2) == {0: 0, 2: 0, 4: 1}
    assert deal([3], {}, 4) == {3: 3}


def test_mistakes(monkeypatch: Any) -> None:
    invalid: list[Any] = [[], [iter([1])], [(each for each in [1])], [3]]
    for sources in invalid:
        with pytest.raises(ronde.UsageError):
            SeveralStreams(Positions(), sources, 4, "")
    reader = Reader()
    SeveralStreams(Positions(), [reader], 4, "")
    assert reader.opened == 0
    positions = Positions()
    positions.live["x#0"] = Position(1, 3)
    world = World(1)
    world.here.rank = 0
    monkeypatch.setattr(comm, "world", lambda: world)
    monkeypatch.setattr(world, "allgather", lambda array: np.array([1, 4, 2, 4]))
    with pytest.raises(ronde.MismatchError, match="rank 0: 1, 4; rank 1: 2, 4"):
        next(iter(SeveralStreams(positions, [[1]], 4, "x")))
