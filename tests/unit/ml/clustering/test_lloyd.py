"""The parts of k-means: the native assignment, rows chosen by keys, rows that move to empty clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.errors import UsageError
from ronde.ml.clustering.lloyd import ChosenRows, best_candidates, far_keys, move_rows, random_keys
from ronde.ml.clustering.points import find_nearest, sum_nearest

Array = NDArray[Any]


def chosen(points: Array, keys: Array) -> ChosenRows:
    return ChosenRows(np.arange(len(points)), points, np.ones(len(points)), keys)


def test_the_nearest_centers_and_their_sums() -> None:
    points = np.array([[0.0, 0], [2, 0], [1, 0], [9, 9]])
    centers = np.array([[0.0, 0], [2, 0]])
    nearest = find_nearest(points, centers)
    assert nearest.labels.tolist() == [0, 1, 0, 1]  # of equally near centers the first
    assert nearest.squared_distances.tolist() == [0, 0, 1, 130]
    total = sum_nearest(points, centers, np.array([1, 2, 0.5, 0]))
    assert total["sums"].tolist() == [[0.5, 0, 1.5], [4, 0, 2]]
    assert total["loss"] == 0.5
    assert nearest.loss == 131


def test_near_points_far_from_the_origin_keep_their_digits() -> None:
    points = np.array([[1e9], [1e9 + 1e-3]])
    assert find_nearest(points, points).labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("points", "centers", "weights", "message"),
    [
        (np.ones((2, 2)), np.ones((1, 3)), None, "different numbers of columns"),
        (np.ones((2, 2)), np.ones((1, 2), "f4"), None, "different types"),
        (np.ones((2, 2), "i8"), np.ones((1, 2), "i8"), None, "neither float32 nor float64"),
        (np.ones((2, 2)), np.ones((0, 2)), None, "no columns or no centers"),
        (np.ones((2, 2)), np.ones((1, 2)), np.ones(3), "one weight for each row"),
    ],
)
def test_arrays_that_do_not_match_are_refused(points: Any, centers: Any, weights: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_nearest(points, centers, weights)


def test_the_smallest_keys_win_and_of_equal_ones_the_first_rows() -> None:
    keys = np.array([3, 1, np.inf, 1, np.nan, 1, 0])
    rows = chosen(np.arange(7.0)[:, None], keys)
    assert rows.smallest(3).numbers.tolist() == [6, 1, 3]
    assert rows.smallest(10).numbers.tolist() == [6, 1, 3, 5, 0]


def test_draws_follow_the_weights() -> None:
    weights = np.array([1.0, 3, 0, 6])
    first = [int(np.argmin(random_keys([seed])(np.ones((4, 1)), weights, 0))) for seed in range(2000)]
    np.testing.assert_allclose(np.bincount(first, minlength=4) / 2000, weights / 10, atol=0.03)


def test_equal_candidates_count_as_one_in_any_order() -> None:
    random = np.random.default_rng(0)
    points = random.normal(size=(50, 2))
    weights = random.integers(0, 4, size=50)
    expected = best_candidates(points, weights.astype(float), 5, [1])
    order = random.permutation(weights.sum())
    repeated = np.repeat(points, weights, axis=0)[order]
    assert best_candidates(repeated, np.ones(len(repeated)), 5, [1]).tolist() == expected.tolist()
    assert best_candidates(points[:2], np.ones(2), 3, [1]).tolist() == sorted(points[:2].tolist()) + [
        min(points[:2].tolist())
    ]


def test_a_row_that_moves_leaves_its_cluster() -> None:
    points, centers = np.array([[0.0], [4], [10]]), np.array([[1.0], [9], [50]])
    sums = sum_nearest(points, centers)["sums"]
    farthest = chosen(points, far_keys(points, np.ones(3), centers)).smallest(1)
    assert farthest.points.tolist() == [[4]]
    move_rows(sums, centers, np.array([2]), farthest)
    assert sums.tolist() == [[0, 1], [10, 1], [4, 1]]
    move_rows(sums, centers, np.array([2]), chosen(points[2:], np.zeros(1)))
    assert sums.tolist() == [[0, 1], [0, 0], [10, 1]]
