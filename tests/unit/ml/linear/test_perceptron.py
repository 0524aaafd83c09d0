"""The perceptron: what a step does, which rows it separates, and its accuracy next to scikit-learn's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import sklearn.linear_model
from scipy.sparse import csr_array
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning

from ronde.ml import Perceptron

ROWS = np.array([[1.0, 0.0], [3.0, 1.0], [-1.0, 2.0], [-2.0, -1.0]])
SIDES = np.array(["right", "right", "left", "left"])


def test_a_step_moves_by_the_mean_of_the_rows_on_the_wrong_side() -> None:
    model = Perceptron().partial_fit(ROWS, SIDES, classes=["left", "right"])
    assert (model.coef_.tolist(), model.intercept_.tolist()) == ([[7 / 4, 0.0]], [0.0])
    wrong = np.array([[-2.0, 4.0]])
    model.partial_fit(np.vstack([ROWS, wrong]), [*SIDES, "right"], sample_weight=[1, 1, 1, 1, 4])
    assert (model.coef_.tolist(), model.intercept_.tolist()) == ([[7 / 4 - 1, 2.0]], [0.5])


def test_a_step_with_some_of_the_classes() -> None:
    model = Perceptron(fit_intercept=False, class_weight={"a": 2.0})
    model.partial_fit(ROWS[:2], ["a", "b"], classes=["c", "b", "a"])
    np.testing.assert_allclose(model.coef_ * 3, [[-1, -1], [1, 1], [-5, -1]])
    with pytest.raises(ValueError, match=r"y has the classes \['d'\], and all classes are \['a', 'b', 'c'\]"):
        model.partial_fit(ROWS[:2], ["a", "d"])
    with pytest.raises(ValueError, match=r"classes=\['a', 'b'\] differ from those before, \['a', 'b', 'c'\]"):
        model.partial_fit(ROWS[:2], ["a", "b"], classes=["a", "b"])


def test_mistakes_of_partial_fit() -> None:
    with pytest.raises(ValueError, match="classes is None: the first call of partial_fit needs all classes"):
        Perceptron().partial_fit(ROWS, SIDES)
    with pytest.raises(ValueError, match='class_weight="balanced" needs all rows at once'):
        Perceptron(class_weight="balanced").partial_fit(ROWS, SIDES, classes=["left", "right"])


@pytest.mark.parametrize("form", [np.asarray, csr_array, lambda rows: rows.astype(np.float32)])
@pytest.mark.parametrize("groups", [2, 4])
def test_planes_separate_rows_that_can_be_separated(form: Callable[[Any], Any], groups: int) -> None:
    random = np.random.default_rng(0)
    centers = 6 * np.eye(4)[:groups]  # each group is on one side of a plane, the others on the other
    y = random.integers(groups, size=400)
    X = (centers[y] + random.uniform(-1, 1, size=(400, 4))) * [0.01, 1, 100, 1] + [5, 0, -1000, 2]
    model = Perceptron().fit(form(X), y)
    assert model.score(form(X), y) == 1
    assert model.history_[-1]["best_loss"] == 0
    assert model.n_iter_ < 50


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_digits, load_iris])
def test_the_accuracy_is_within_two_percent_of_scikit_learns_or_above(load: Callable[..., Any]) -> None:
    X, y = load(return_X_y=True)
    ours = Perceptron().fit(X[::2], y[::2])
    theirs = [sklearn.linear_model.Perceptron(random_state=seed).fit(X[::2], y[::2]) for seed in range(5)]
    mean = np.mean([each.score(X[1::2], y[1::2]) for each in theirs])
    assert ours.score(X[1::2], y[1::2]) >= mean - 0.02


def test_the_weights_with_the_fewest_mistakes_are_kept() -> None:
    # The last row cannot be separated.
    X, y = (np.array([[-2.0], [-1.0], [1.0], [2.0], [-1.5]]), [0, 0, 1, 1, 1])
    with pytest.warns(ConvergenceWarning, match="Perceptron has not converged in 20 steps: raise max_iter"):
        model = Perceptron(max_iter=20).fit(X, y)
    assert model.score(X, y) == 0.8
    assert model.n_iter_ == len(model.history_) == 20
    again = Perceptron(n_iter_no_change=5).fit(X, y)
    assert again.score(X, y) == 0.8
    assert again.n_iter_ < 20


def test_a_warm_start_goes_on_from_the_best_weights() -> None:
    X, y = load_iris(return_X_y=True)
    model = Perceptron(n_iter_no_change=30, warm_start=True).fit(X, y)
    best = model.history_[-1]["best_loss"]
    assert model.fit(X, y).history_[0]["loss"] == best


@pytest.mark.parametrize(("columns", "classes", "expected"), [(4, 2, r"\(1, 4\)"), (1, 3, r"\(3, 1\)")])
def test_a_warm_start_needs_the_same_classes_and_columns(columns: int, classes: int, expected: str) -> None:
    X, y = load_iris(return_X_y=True)
    model = Perceptron(warm_start=True).fit(X, y)
    with pytest.raises(ValueError, match=rf"the shape \(3, 4\), and these classes .* need {expected}"):
        model.fit(X[y < classes, :columns], y[y < classes])
