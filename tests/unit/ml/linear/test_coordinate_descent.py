"""Coordinate descent on a matrix of second moments, which is the inner loop of Lasso and ElasticNet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde._native import descend_coordinates
from ronde.errors import UsageError
from ronde.ml.linear.coordinate_descent import minimize_quadratic

Array = NDArray[Any]


def violation(matrix: Array, slopes: Array, penalties: Array, w: Array) -> float:
    gradient = matrix @ w + slopes
    excess = np.where(w == 0, np.abs(gradient) - penalties, np.abs(gradient + penalties * np.sign(w)))
    return float(excess.max())


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("noise", [1.0, 1e-3, 1e-5])
def test_correlated_columns_reach_the_minimum(rows: int, noise: float) -> None:
    random = np.random.default_rng(rows)
    columns = random.normal(size=(rows, 1)) + noise * random.normal(size=(rows, 12))
    matrix, slopes = columns.T @ columns / rows, -columns.T @ random.normal(size=rows) / rows
    penalties, w, gradient = np.full(12, 1e-3 * noise), np.zeros(12), slopes.copy()
    assert minimize_quadratic(matrix, penalties, gradient, w, 1e-10)
    assert violation(matrix, slopes, penalties, w) < 1e-9
    np.testing.assert_allclose(gradient, matrix @ w + slopes, atol=1e-9)


def test_columns_without_curvature_keep_their_coefficients() -> None:
    w, gradient = np.zeros(2), np.array([-2.0, -7.0])
    assert descend_coordinates(np.diag([1.0, 0.0]), np.zeros(2), gradient, w, 0.0, 5) == 1
    assert w.tolist() == [2, 0]


@pytest.mark.parametrize("wrong", range(4))
def test_arrays_of_different_lengths_are_refused(wrong: int) -> None:
    arrays = [np.eye(3), np.ones(3), np.ones(3), np.ones(3)]
    arrays[wrong] = np.eye(2) if wrong == 0 else np.ones(2)
    with pytest.raises(UsageError, match="the arrays do not match: expected"):
        descend_coordinates(arrays[0], arrays[1], arrays[2], arrays[3], 0.0, 1)
