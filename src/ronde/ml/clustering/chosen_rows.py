"""Choosing a few rows out of those of all tasks: the ones with the smallest keys.

Keys are computed for each row block, from its points and its number, so the choice does not depend on the tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.light_dataclasses import dataclass
from ronde.ml.clustering.block_points import PointReader

__all__ = ["ChosenRows", "Keys", "choose_rows", "random_keys"]

Array = NDArray[Any]
Keys = Callable[[Array, Array, int], Array]  # of points, by their weights and the number of their block


@dataclass(frozen=True)
class ChosenRows:
    """Rows by increasing key: keys, numbers among the rows of all tasks, points and weights."""

    keys: Array
    numbers: Array
    points: Array
    weights: Array

    def smallest(self, count: int) -> ChosenRows:
        """Return the rows with the smallest finite keys; of equal ones those with the smallest numbers."""
        kept = np.flatnonzero(np.isfinite(self.keys))
        if len(kept) > count:
            kept = kept[self.keys[kept] <= np.partition(self.keys[kept], count - 1)[count - 1]]
        order = kept[np.lexsort((self.numbers[kept], self.keys[kept]))][:count]
        return ChosenRows(self.keys[order], self.numbers[order], self.points[order], self.weights[order])


def choose_rows(c: IterationStep, reader: PointReader, count: int, keys: Keys) -> ChosenRows:
    """Return up to `count` rows of all tasks, those with the smallest finite keys. All tasks call it."""
    chosen: list[ChosenRows] = []
    begin = c.row_range.start
    for block_no, block in zip(c.block_range, c.blocks):
        points, weights = reader.of_block(block)
        weights = np.ones(len(points)) if weights is None else weights
        numbers = np.arange(begin, begin + len(points))
        rows = ChosenRows(keys(points, weights, block_no), numbers, points, weights).smallest(count)
        chosen = [_smallest([*chosen, rows], count)]
        begin += len(points)
    return _smallest([rows for task in c.gather(chosen) for rows in task], count)


def random_keys(seed: list[int]) -> Keys:
    """Return keys by which rows are drawn without replacement, with probabilities in proportion to their weights."""

    def keys(points: Array, weights: Array, block_no: int) -> Array:
        random = np.random.default_rng([*seed, block_no])
        with np.errstate(divide="ignore"):  # a row without weight is never drawn
            drawn: Array = random.exponential(size=len(points)) / weights
        return drawn

    return keys


def _smallest(parts: list[ChosenRows], count: int) -> ChosenRows:
    joined = [
        np.concatenate(each) for each in zip(*((p.keys, p.numbers, p.points, p.weights) for p in parts))
    ]
    return ChosenRows(*joined).smallest(count)
