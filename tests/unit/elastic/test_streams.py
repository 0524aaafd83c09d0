"""Each sample of a stream is in one committed step, whatever happens to the world."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import ronde
from ronde.comm import world as comm
from ronde.elastic.batches import Positions, StreamBatches

SAMPLES = 23


class Numbers:
    """Can only be iterated, any number of times."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def opened(start: int) -> Iterable[int]:
    return range(start, SAMPLES)


def steps_of_world(
    size: int, copies: list[Positions], source: Any, monkeypatch: Any
) -> Iterator[list[list[int]]]:
    """Yield the shares of all ranks, step by step; `copies`: the positions of each."""

    def of_rank(rank: int) -> Iterator[list[int]]:
        return iter(StreamBatches(copies[rank], source, 4, ""))

    iterators = [of_rank(rank) for rank in range(size)]
    monkeypatch.setattr(comm, "size", lambda: size)
    while True:
        shares = []
        for rank, each in enumerate(iterators):
            monkeypatch.setattr(comm, "rank", lambda rank=rank: rank)
            shares.append(next(each, None))
        if shares[0] is None:
            assert shares == [None] * size
            return
        yield [share for share in shares if share is not None]


@pytest.mark.parametrize("source", [Numbers(), opened])
def test_a_stream_in_worlds_of_several_sizes(source: Any, monkeypatch: Any) -> None:
    """A step that no commit has made final is made again, also by a new process; all steps have the same batches."""
    committed: list[list[int]] = []
    payload: Any = {}
    for size, steps in ((3, 2), (2, 1), (5, 2), (1, 9)):
        copies = [Positions() for _ in range(size)]
        for each in copies:
            each.load(payload)
        world = steps_of_world(size, copies, source, monkeypatch)
        for shares in itertools.islice(world, steps):
            committed.append([sample for share in shares for sample in share])
            copies[0].save()
            payload = copies[0].payload()
        next(world, None)  # a step without a commit
    assert committed == [list(range(SAMPLES))[begin : begin + 4] for begin in range(0, SAMPLES, 4)]


def test_an_iterator_is_refused() -> None:
    with pytest.raises(ronde.UsageError, match="read only once"):
        StreamBatches(Positions(), iter(range(3)), 4, "")
    with pytest.raises(ronde.UsageError, match="global_batch=0"):
        StreamBatches(Positions(), Numbers(), 0, "")
