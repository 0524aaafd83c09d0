"""The batches of an elastic training: the position in them is part of its state.

Which samples a rank gets is a function of seed, epoch, step, its rank and the size of the world. The order of an epoch
does not depend on the version of NumPy: samples are sorted by a hash of seed, epoch and index (splitmix64, by Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.comm import world as comm
from ronde.elastic.exact_sums import exact_sum
from ronde.errors import UsageError

__all__ = [
    "Batches",
    "Pieces",
    "Position",
    "Positions",
    "StreamBatches",
    "check_source",
    "open_source",
    "order_of_epoch",
    "share_of",
]


class Position(NamedTuple):
    """The next step. `step`: in the epoch."""

    epoch: int = 0
    step: int = 0


class Positions:
    """The positions in all batches of a program, by name: a part of the state."""

    is_sharded = False

    def __init__(self) -> None:
        self.live: dict[str, Position] = {}
        self._copy: dict[str, Position] = {}

    def save(self) -> None:
        """Copy the positions."""
        self._copy = dict(self.live)

    def restore(self) -> None:
        """Go back to the copy."""
        self.live = dict(self._copy)

    def payload(self) -> object:
        """Return the copy."""
        return {name: tuple(position) for name, position in self._copy.items()}

    def load(self, payload: Any) -> None:
        """Take a payload as the copy, and as the live positions."""
        self._copy = {name: Position(*position) for name, position in payload.items()}
        self.restore()


class Batches:
    """See `State.batches`."""

    def __init__(
        self,
        positions: Positions,
        data: Any,
        global_batch: int,
        seed: int | None,
        epochs: int,
        micro_batch: int | None,
        name: str,
    ) -> None:
        if global_batch < 1:
            raise UsageError(f"global_batch={global_batch} is invalid: expected 1 or more")
        if micro_batch is not None and not 1 <= micro_batch <= global_batch:
            raise UsageError(
                f"micro_batch={micro_batch} is invalid: expected 1 to global_batch={global_batch}"
            )
        self._positions, self._data, self._name = positions, data, name
        self._count = _length(data)
        self._batch, self._seed, self._epochs, self._micro = global_batch, seed, epochs, micro_batch

    def __iter__(self) -> Iterator[Any]:
        steps = steps_per_epoch(self._count, self._batch)
        position = self._positions.live.get(self._name, Position())
        while position.epoch < self._epochs and steps:
            order = order_of_epoch(self._count, self._seed, position.epoch)
            for step in range(position.step, steps):
                is_last = step + 1 == steps
                # Before the step, so that a commit in it has the next one.
                self._positions.live[self._name] = (
                    Position(position.epoch + 1) if is_last else Position(position.epoch, step + 1)
                )
                yield self._of_rank(order[step * self._batch : (step + 1) * self._batch])
            position = Position(position.epoch + 1)

    def _of_rank(self, indices: NDArray[np.int64]) -> Any:
        if self._micro is None:
            return take(self._data, indices[share_of(len(indices), comm.rank(), comm.size())])
        pieces = pieces_of(indices, self._micro)
        mine = pieces[share_of(len(pieces), comm.rank(), comm.size())]
        return Pieces([take(self._data, piece) for piece in mine], len(pieces), len(indices))


class StreamBatches:
    """See `State.stream`. All ranks read the same stream, and each takes its share of each global batch.

    A position is the number of samples taken: one number, the same on all ranks.
    """

    def __init__(
        self,
        positions: Positions,
        source: Callable[[int], Iterable[Any]] | Iterable[Any],
        global_batch: int,
        name: str,
    ) -> None:
        check_source(source, global_batch)
        self._positions, self._source, self._batch, self._name = positions, source, global_batch, name

    def __iter__(self) -> Iterator[list[Any]]:
        position = self._positions.live.get(self._name, Position())
        if position.epoch:  # the stream has ended
            return
        taken = position.step
        samples = open_source(self._source, taken)
        while batch := list(itertools.islice(samples, self._batch)):
            taken += len(batch)
            # Before the step, so that a commit in it has the next one.
            self._positions.live[self._name] = Position(0, taken)
            yield batch[share_of(len(batch), comm.rank(), comm.size())]
        self._positions.live[self._name] = Position(1, taken)


def check_source(source: object, global_batch: int) -> None:
    """Raise UsageError unless a stream can be opened at each commit, and the batch is possible."""
    if global_batch < 1:
        raise UsageError(f"global_batch={global_batch} is invalid: expected 1 or more")
    if callable(source):
        return
    if not isinstance(source, Iterable):
        raise UsageError(
            f"a {type(source).__name__} is no stream: pass an iterable, or a function that returns one"
        )
    if isinstance(source, Iterator):  # `iter` could begin to read, or start the workers of a loader
        raise UsageError(
            f"a {type(source).__name__} can be read only once, but a loss takes it back to the last commit: "
            "pass a function that opens the stream at a sample's number"
        )


def open_source(source: Callable[[int], Iterable[Any]] | Iterable[Any], start: int) -> Iterator[Any]:
    """Return the samples of a stream from number `start` on."""
    if callable(source):
        return iter(source(start))
    return itertools.islice(source, start, None)


class Pieces:
    """This rank's fixed pieces of a global batch; iterate over them, or `sum` a function of each.

    Attributes:
        total: The number of pieces of all ranks.
        samples: The number of samples of all ranks.
    """

    def __init__(self, mine: Sequence[Any], total: int, samples: int) -> None:
        self._mine, self.total, self.samples = mine, total, samples

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mine)

    def sum(self, function: Callable[[Any], Any], like: Any) -> Any:
        """Return the sum of `function(piece)` over the pieces of all ranks, the same bits for every size of the world.

            gradient = batch.sum(lambda piece: loss_gradient(weights, *piece), like=weights) / batch.samples

        All ranks call it, also one without a piece. The results for all pieces of this rank are in memory together.

        Args:
            function: returns an array of floating-point numbers, or a list of arrays, for one piece.
            like: an array, or a list of them, with the shapes and dtypes of the result.
        """
        is_single = isinstance(like, np.ndarray)
        results = [function(piece) for piece in self._mine]
        summands = [[each] if is_single else list(each) for each in results]
        sums = exact_sum(comm.world(), summands, [like] if is_single else list(like), self.total)
        return sums[0] if is_single else sums


def _length(data: Any) -> int:
    if isinstance(data, int):
        return data
    columns: list[Any] = []
    if isinstance(data, tuple | list) and data and all(hasattr(each, "shape") for each in data):
        columns = list(data)
    elif isinstance(data, dict):
        columns = list(data.values())
    if not columns:
        if not hasattr(data, "__len__"):
            raise UsageError(f"data of batches() needs a length, which {type(data).__name__} has not")
        return len(data)
    lengths = {len(each) for each in columns}
    if len(lengths) != 1:
        raise UsageError(f"the arrays of batches() have different lengths: {sorted(lengths)}")
    return lengths.pop()


def take(data: Any, indices: NDArray[np.int64]) -> Any:
    """Return the samples with these indices."""
    if isinstance(data, int):
        return indices
    if isinstance(data, dict):
        return {name: each[indices] for name, each in data.items()}
    if isinstance(data, tuple | list) and data and all(hasattr(each, "shape") for each in data):
        return type(data)(each[indices] for each in data)
    if hasattr(data, "shape"):
        return data[indices]
    return [data[int(index)] for index in indices]


# The order of samples

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def order_of_epoch(count: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """Return the indices 0 to `count` - 1 in the order of an epoch. `seed`: None keeps the order of the data."""
    if seed is None:
        return np.arange(count, dtype=np.int64)
    start = np.array([(seed * _STEP + epoch) & _MASK], np.uint64)
    keys = _mixed(_mixed(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP))
    return np.argsort(keys, kind="stable").astype(np.int64)


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Return the number of batches of an epoch; the last one may be smaller."""
    return -(-count // global_batch)


def share_of(count: int, rank: int, size: int) -> slice:
    """Return which of `count` consecutive items a rank gets: shares differ by one item at most, and may be empty."""
    each, more = divmod(count, size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def pieces_of(batch: NDArray[np.int64], micro_batch: int) -> list[NDArray[np.int64]]:
    """Return the fixed pieces of a global batch, the same for every size of the world; the last may be smaller."""
    return [batch[begin : begin + micro_batch] for begin in range(0, len(batch), micro_batch)]
