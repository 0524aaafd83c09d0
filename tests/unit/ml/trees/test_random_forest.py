"""Forests: their models against scikit-learn's, and what is special about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import sklearn.ensemble
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.metrics import log_loss

import ronde.ml
from ronde.errors import UsageError
from ronde.ml import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
    load,
)
from ronde.ml.trees.forests import check_forest_rows

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 5))
Y = X[:, 0] * X[:, 1] + np.abs(X[:, 2]) + 0.1 * rng.normal(size=300)
CLASSES = np.digitize(Y, [0.0, 1.0])
KINDS = [RandomForestClassifier, RandomForestRegressor, ExtraTreesClassifier, ExtraTreesRegressor]


def fitted(kind: Any, *others: Any, **params: Any) -> Any:
    y = CLASSES if "Classifier" in kind.__name__ else Y
    return kind(**{"n_estimators": 9, "random_state": 0, **params}).fit(X, y, *others)


def trees_of(model: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model.trees_.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [None, np.abs(X[:, 4])], ids=["plain", "weighted"])
def test_threads_give_the_bits_of_one(kind: Any, weights: Any) -> None:
    rules: dict[str, Any] = {"bootstrap": True, "oob_score": True, "n_estimators": 30}
    models = [fitted(kind, weights, on=f"threads:{tasks}", **rules) for tasks in (1, 2, 3, 4)]
    for model in models[1:]:
        assert trees_of(model) == trees_of(models[0])
        assert model.oob_score_ == models[0].oob_score_
        assert model.history_ == models[0].history_


@pytest.mark.slow
@pytest.mark.parametrize("data", [load_breast_cancer, load_digits, load_wine])
@pytest.mark.parametrize("name", ["RandomForestClassifier", "ExtraTreesClassifier"])
def test_probabilities_are_as_good_as_scikit_learns(data: Any, name: str) -> None:
    rows, y = data(return_X_y=True)
    train = np.arange(len(rows)) % 3 > 0

    def loss(library: Any) -> float:
        models = [
            getattr(library, name)(random_state=seed, min_samples_leaf=2).fit(rows[train], y[train])
            for seed in range(2)
        ]
        return float(np.mean([log_loss(y[~train], model.predict_proba(rows[~train])) for model in models]))

    assert loss(ronde.ml) < 1.1 * loss(sklearn.ensemble)


@pytest.mark.parametrize("kind", [RandomForestRegressor, ExtraTreesRegressor])
def test_numbers_are_as_good_as_scikit_learns(kind: Any) -> None:
    data, y = load_diabetes(return_X_y=True)
    train = np.arange(len(data)) % 3 > 0
    model = kind(random_state=0).fit(data[train], y[train])
    assert model.score(data[~train], y[~train]) > 0.4  # scikit-learn: 0.44 to 0.47


@pytest.mark.parametrize("criterion", ["gini", "entropy"])
def test_a_single_tree_is_that_of_scikit_learn(criterion: str) -> None:
    from sklearn.tree import DecisionTreeClassifier

    whole = np.round(X, 1)
    tree = DecisionTreeClassifier(
        criterion=criterion, min_samples_leaf=5, max_leaf_nodes=9, random_state=0
    ).fit(whole, CLASSES)
    model = RandomForestClassifier(
        1, criterion=criterion, bootstrap=False, max_features=None, min_samples_leaf=5, max_leaf_nodes=9
    ).fit(whole, CLASSES)
    np.testing.assert_allclose(model.predict_proba(whole), tree.predict_proba(whole), rtol=1e-12)
    np.testing.assert_allclose(model.feature_importances_, tree.feature_importances_, rtol=1e-9)


def test_a_full_tree_fits_the_targets() -> None:
    model = fitted(RandomForestRegressor, bootstrap=False, n_estimators=2)
    np.testing.assert_allclose(model.predict(X), Y, rtol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_counts_as_that_many_rows_in_any_order(kind: Any) -> None:
    weights, order = rng.integers(0, 4, size=300), rng.permutation(300)
    y = CLASSES if "Classifier" in kind.__name__ else Y
    rules: dict[str, Any] = {"n_estimators": 5, "bootstrap": True, "random_state": 1}
    weighted = kind(**rules).fit(X[order], y[order], weights[order])
    repeated = kind(**rules).fit(np.repeat(X, weights, axis=0), np.repeat(y, weights))
    predict = "predict_proba" if hasattr(kind, "predict_proba") else "predict"
    np.testing.assert_allclose(getattr(weighted, predict)(X), getattr(repeated, predict)(X))


def test_missing_values_go_to_the_better_side() -> None:
    data = X.copy()
    data[::3, 0] = np.nan
    model = RandomForestClassifier(20, max_features=None).fit(data, np.isnan(data[:, 0]))
    assert model.score(data, np.isnan(data[:, 0])) == 1


@pytest.mark.parametrize("kind", [RandomForestRegressor, ExtraTreesRegressor])
def test_categories_are_divided_by_their_means(kind: Any) -> None:
    categories = rng.integers(0, 20, size=(600, 1)).astype(float)
    y = (categories[:, 0] % 2) + 0.0
    leaves = 2 if kind is RandomForestRegressor else None
    model = kind(3, bootstrap=False, max_leaf_nodes=leaves, categorical_features=[0]).fit(categories, y)
    np.testing.assert_allclose(model.predict(categories), y, atol=1e-12)
    assert model.predict([[99.0], [np.nan]]).shape == (2,)


def test_a_warm_start_continues() -> None:
    whole = fitted(RandomForestClassifier, n_estimators=11)
    model = fitted(RandomForestClassifier, n_estimators=4, warm_start=True)
    model.set_params(n_estimators=11).fit(X, CLASSES)
    assert trees_of(model) == trees_of(whole)
    assert model.history_[-1]["trees"] == 11
    with pytest.raises(ValueError, match="must be larger or equal to the 11 trees"):
        model.set_params(n_estimators=2).fit(X, CLASSES)


def test_rows_that_trees_have_not_drawn(tmp_path: Path) -> None:
    model = fitted(RandomForestClassifier, n_estimators=60, oob_score=True)
    assert model.oob_decision_function_.shape == (300, 3)
    np.testing.assert_allclose(model.oob_decision_function_.sum(axis=1), 1)
    assert model.oob_score_ < model.score(X, CLASSES) == 1
    model.save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert other.oob_score_ == model.oob_score_
    assert np.array_equal(other.predict_proba(X), model.predict_proba(X))
    with pytest.warns(UserWarning, match="too few trees"):
        assert np.isnan(fitted(RandomForestRegressor, n_estimators=1, oob_score=True).oob_prediction_).any()


def test_limits() -> None:
    for given, least in [(20, 20), (0.1, 30)]:
        trees = fitted(RandomForestClassifier, bootstrap=False, min_samples_leaf=given).trees_
        assert trees["count"][trees["column"] < 0].min() >= least
    trees = fitted(RandomForestClassifier, max_leaf_nodes=6).trees_
    assert (np.diff(trees["roots"]) == 11).all()
    trees = fitted(RandomForestRegressor, max_depth=2, max_samples=0.3).trees_
    assert np.diff(trees["roots"]).max() <= 7
    assert 50 < trees["count"][trees["roots"][:-1]].mean() < 110
    assert len(fitted(RandomForestRegressor, min_impurity_decrease=100.0).trees_["column"]) == 9
    assert fitted(RandomForestClassifier).apply(X).shape == (300, 9)


def test_importances_name_the_columns_that_matter() -> None:
    importances = fitted(RandomForestRegressor, n_estimators=30).feature_importances_
    assert importances.sum() == pytest.approx(1)
    assert importances[:3].min() > 1.5 * importances[3:].max()
    without_splits = fitted(RandomForestRegressor, n_estimators=2, max_depth=1, min_samples_leaf=399)
    assert without_splits.feature_importances_.tolist() == [0.0] * len(importances)


@pytest.mark.parametrize("factor", [2.0**-400, 2.0**-60, 2.0**60, 2.0**400])
def test_the_scale_of_the_targets_does_not_matter(factor: float) -> None:
    scaled = RandomForestRegressor(3).fit(X, Y * factor).predict(X)
    np.testing.assert_allclose(scaled / factor, RandomForestRegressor(3).fit(X, Y).predict(X), rtol=1e-6)


def test_a_function_scores_rows_out_of_bag_and_a_warm_start_adds_the_score() -> None:
    model = fitted(RandomForestClassifier, n_estimators=30, warm_start=True)
    with pytest.warns(UserWarning, match="does not fit new trees"):
        model.set_params(oob_score=lambda y, found: 100 * (y == found).mean()).fit(X, CLASSES)
    other = fitted(RandomForestClassifier, n_estimators=30, oob_score=True)
    assert model.oob_score_ == pytest.approx(100 * other.oob_score_)


def test_all_rows_may_be_of_one_class(tmp_path: Path) -> None:
    model = ExtraTreesClassifier(3).fit(X, np.full(300, "one"))
    model.save(tmp_path / "model")
    assert ronde.ml.load(tmp_path / "model").predict(X[:2]).tolist() == ["one", "one"]
    assert model.predict_proba(X).tolist() == [[1.0]] * 300


def test_several_outputs_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sklearn\.multioutput\.MultiOutputRegressor\(RandomForestRegressor"
    ):
        RandomForestRegressor().fit(X, X[:, :2])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bootstrap": False, "oob_score": True}, "only available if bootstrap=True"),
        ({"bootstrap": False, "max_samples": 5}, "`max_samples` cannot be set"),
        ({"max_samples": 999}, "must be <= n_samples=300"),
        ({"categorical_features": [7]}, "has 7: expected a number below 5"),
        ({"categorical_features": [True]}, "as a boolean mask must have shape"),
    ],
)
def test_wrong_arguments(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(RandomForestClassifier, **params)


def test_more_rows_are_an_error() -> None:
    with pytest.raises(UsageError, match="grown from at most 134,217,727"):
        check_forest_rows(1 << 27)
