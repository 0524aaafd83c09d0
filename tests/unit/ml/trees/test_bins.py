"""Bins: what fits rely on, apart from whole fits."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.ml.trees.bins import find_bins

rng = np.random.default_rng(0)


@pytest.mark.parametrize("columns", [3, 35])
def test_bins_of_parts_are_joined_and_the_parts_are_given_back(columns: int) -> None:
    X = rng.normal(size=(100, columns))
    bins = find_bins(X, None, 16, np.zeros(columns, np.uint8))
    parts = [bins.of(X[begin:end]) for begin, end in [(0, 30), (30, 30), (30, 37), (37, 100)]]
    assert np.array_equal(bins.joined(parts), bins.of(X))
    assert not parts
