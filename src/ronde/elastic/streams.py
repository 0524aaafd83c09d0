"""The batches of a stream: a reader that can only be iterated. The number of samples taken is part of the state.

All ranks read the same stream, and each takes its share of each global batch. So the batch of all ranks together does
not depend on the size of the world, and a position is one number, the same on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ronde.comm import world as comm
from ronde.elastic.batches import Position, Positions, share_of
from ronde.errors import UsageError

__all__ = ["StreamBatches"]


class StreamBatches:
    """See `State.stream`."""

    def __init__(
        self,
        positions: Positions,
        source: Callable[[int], Iterable[Any]] | Iterable[Any],
        global_batch: int,
        name: str,
    ) -> None:
        if global_batch < 1:
            raise UsageError(f"global_batch={global_batch} is invalid: expected 1 or more")
        if not callable(source) and iter(source) is source:
            raise UsageError(
                f"a {type(source).__name__} can be read only once, but a loss takes it back to the last commit: "
                "pass a function that opens the stream at a sample's number"
            )
        self._positions, self._source, self._batch, self._name = positions, source, global_batch, name

    def __iter__(self) -> Iterator[list[Any]]:
        position = self._positions.live.get(self._name, Position())
        if position.epoch:  # the stream has ended
            return
        taken = position.step
        samples = self._open(taken)
        while batch := list(itertools.islice(samples, self._batch)):
            taken += len(batch)
            # Before the step, so that a commit in it has the next one.
            self._positions.live[self._name] = Position(0, taken)
            yield batch[share_of(len(batch), comm.rank(), comm.size())]
        self._positions.live[self._name] = Position(1, taken)

    def _open(self, start: int) -> Iterator[Any]:
        if callable(self._source):
            return iter(self._source(start))
        return itertools.islice(self._source, start, None)
