"""Bins: what fits rely on, apart from whole fits."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.ml.trees.bins import find_bins

rng = np.random.default_rng(0)


@pytest.mark.parametrize("columns", [3, 35])
def test_parts_are_put_where_the_bins_of_all_rows_have_them(columns: int) -> None:
    X = rng.normal(size=(100, columns))
    bins = find_bins(X, None, 16, np.zeros(columns, np.uint8))
    binned = bins.empty(len(X))
    for begin, end in [(0, 30), (30, 30), (30, 37), (37, 100)]:
        bins.put(X[begin:end], binned, begin)
    assert np.array_equal(binned, bins.of(X))


def test_bins_by_range_are_narrower_at_both_ends() -> None:
    numbers = np.random.default_rng(0).normal(size=(5000, 1))
    no_categories = np.zeros(1, np.uint8)
    last = [find_bins(numbers, None, 100, no_categories, part).values[-1] for part in (0.0, 0.5)]
    assert last[0] < 2.6 < 3 < last[1]
    numbers[0] = np.inf
    assert len(find_bins(numbers, None, 100, no_categories, 0.5).values) > 90
