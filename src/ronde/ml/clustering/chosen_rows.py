"""Choosing a few rows out of those of all tasks: the ones with the smallest keys.

Keys are computed for each row block, from its points and its number, so the choice does not depend on the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.ml.clustering.block_points import PointReader
from ronde.ml.clustering.points import Points, as_centers, join_points

__all__ = ["ChosenRows", "Keys", "all_rows", "choose_rows", "random_keys", "rows_by_number"]

Array = NDArray[Any]
Keys = Callable[[Points, Array, int], Array]  # of points, by their weights and the number of their block


@dataclass(frozen=True)
class ChosenRows:
    """Rows: their numbers among those of all tasks, their points and weights; keys, once there are any."""

    numbers: Array
    points: Points
    weights: Array
    keys: Array = field(default_factory=lambda: np.empty(0))

    def with_keys(self, keys: Array) -> ChosenRows:
        """Return the same rows with keys."""
        return ChosenRows(self.numbers, self.points, self.weights, keys)

    def as_centers(self) -> Array:
        """Return the points as an array."""
        return as_centers(self.points)

    def smallest(self, count: int) -> ChosenRows:
        """Return the rows with the smallest finite keys; of equal ones those with the smallest numbers."""
        kept = np.flatnonzero(np.isfinite(self.keys))
        if len(kept) > count:
            kept = kept[self.keys[kept] <= np.partition(self.keys[kept], count - 1)[count - 1]]
        order = kept[np.lexsort((self.numbers[kept], self.keys[kept]))][:count]
        return ChosenRows(self.numbers[order], self.points[order], self.weights[order], self.keys[order])


def all_rows(c: IterationStep, reader: PointReader) -> Iterator[ChosenRows]:
    """Yield the rows of each of this task's blocks."""
    begin = c.row_range.start
    for block in c.blocks:
        points, weights = reader.of_block(block)
        weights = np.ones(points.shape[0]) if weights is None else weights
        yield ChosenRows(np.arange(begin, begin + len(weights)), points, weights)
        begin += len(weights)


def rows_by_number(c: IterationStep, reader: PointReader, numbers: Array) -> Iterator[ChosenRows]:
    """Yield, of each of this task's blocks, the rows with these numbers, which increase."""
    begin = c.row_range.start
    for block in c.blocks:
        first, last = np.searchsorted(numbers, [begin, begin + block.X.shape[0]])
        places = numbers[first:last] - begin
        weights = getattr(block, "sample_weight", None)
        weights = np.ones(len(places)) if weights is None else np.asarray(weights[places], np.float64)
        yield ChosenRows(numbers[first:last], reader.points(block.X[places]), weights)
        begin += block.X.shape[0]


def choose_rows(c: IterationStep, blocks: Iterable[ChosenRows], count: int, keys: Keys) -> ChosenRows:
    """Return up to `count` rows of all tasks, those with the smallest finite keys. All tasks call it.

    `blocks`: rows of each of this task's blocks.
    """
    chosen: list[ChosenRows] = []
    for block_no, rows in zip(c.block_range, blocks):
        rows = rows.with_keys(keys(rows.points, rows.weights, block_no)).smallest(count)
        chosen = [_smallest([*chosen, rows], count)]
    return _smallest([rows for task in c.gather(chosen) for rows in task], count)


def random_keys(seed: list[int]) -> Keys:
    """Return keys by which rows are drawn without replacement, with probabilities in proportion to their weights."""

    def keys(points: Points, weights: Array, block_no: int) -> Array:
        random = np.random.default_rng([*seed, block_no])
        with np.errstate(divide="ignore"):  # a row without weight is never drawn
            drawn: Array = random.exponential(size=len(weights)) / weights
        return drawn

    return keys


def _smallest(parts: list[ChosenRows], count: int) -> ChosenRows:
    numbers, weights, keys = map(np.concatenate, zip(*((p.numbers, p.weights, p.keys) for p in parts)))
    points = join_points([part.points for part in parts])
    return ChosenRows(numbers, points, weights, keys).smallest(count)
