"""Linear models whatever the units of X and y: constant columns, small and large numbers, columns of mixed scales."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from scipy.sparse import csr_array
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning

import ronde.ml

random = np.random.default_rng(0)
X = random.normal(size=(400, 4)) + [0, 1, -2, 0.5]
Y = X @ [1.0, -2.0, 3.0, 0.0] + 0.1 * random.normal(size=400)
WEIGHTS = random.uniform(0, 2, size=400) * (np.arange(400) % 7 > 0)
WIDE = random.normal(size=(60, 1001))
WIDE_Y = WIDE[:, :5] @ [1.0, -2.0, 3.0, -4.0, 5.0]

REGRESSORS: dict[str, Callable[[float], Any]] = {  # by a factor of y
    "LinearRegression": lambda scale: ronde.ml.LinearRegression(),
    "Ridge": lambda scale: ronde.ml.Ridge(0.1),
    "Lasso": lambda scale: ronde.ml.Lasso(0.1 * scale),
    "ElasticNet": lambda scale: ronde.ml.ElasticNet(0.1),
}
CLASSIFIERS = {
    "LogisticRegression": ronde.ml.LogisticRegression(),
    "LinearSVC": ronde.ml.LinearSVC(),
    "Perceptron": ronde.ml.Perceptron(),
}
SCALES = [1e-12, 1e-8, 1e-3, 1e3, 1e12]


def elastic_net(scale: float) -> Any:
    """The penalty on absolute values scales like y, that on squares does not."""
    l1, l2 = 0.05 * scale, 0.05
    return ronde.ml.ElasticNet(l1 + l2, l1_ratio=l1 / (l1 + l2))


@pytest.mark.parametrize("constant", [0.1, 0.3, 1.1, 3.3, 1e8 + 0.1])
@pytest.mark.parametrize("make", [np.asarray, csr_array, np.float32])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("name", REGRESSORS)
def test_a_constant_column_has_the_coefficient_0(name: str, weights: Any, make: Any, constant: float) -> None:
    rows = np.c_[X, np.full(len(X), constant), np.zeros(len(X))]
    model = REGRESSORS[name](1.0).fit(make(rows), Y, weights)
    expected = REGRESSORS[name](1.0).fit(make(X), Y, weights)
    assert model.coef_[4:].tolist() == [0, 0]
    precision = 1e-5 if make is np.float32 else 1e-9
    np.testing.assert_allclose(model.coef_[:4], expected.coef_, atol=precision)
    np.testing.assert_allclose(model.intercept_, expected.intercept_, atol=precision)


@pytest.mark.parametrize("name", REGRESSORS)
def test_rounding_errors_of_a_constant_are_no_column(name: str) -> None:
    """0.1 + 0.2 and 0.3 differ in the last place."""
    nearly = np.where(np.arange(len(X)) % 2, 0.1 + 0.2, 0.3)
    assert REGRESSORS[name](1.0).fit(np.c_[X, nearly], Y).coef_[4] == 0
    assert REGRESSORS[name](1.0).fit(np.c_[X, nearly.astype(np.float32)].astype(np.float32), Y).coef_[4] == 0


def test_a_small_variation_of_a_large_column_counts() -> None:
    second = np.arange(len(X)) % 60
    stamps = 1.7e9 + second
    model = ronde.ml.LinearRegression().fit(np.c_[X, stamps], Y + 5 * second)
    np.testing.assert_allclose(model.coef_[4], 5, atol=1e-2)
    zero = ronde.ml.LinearRegression().fit(np.c_[X, second], Y + 5 * second)
    np.testing.assert_allclose(model.coef_, zero.coef_, atol=1e-6)


def test_without_an_intercept_a_constant_column_is_one() -> None:
    rows = np.c_[X, np.full(len(X), 0.1)]
    model = ronde.ml.LinearRegression(fit_intercept=False).fit(rows, Y + 3)
    np.testing.assert_allclose(
        model.coef_[4] * 0.1, ronde.ml.LinearRegression().fit(X, Y + 3).intercept_, atol=1e-9
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("name", [*REGRESSORS, "two outputs"])
def test_units_of_y_have_no_effect(name: str, fit_intercept: bool, scale: float) -> None:
    def fitted(scale: float) -> Any:
        make = {**REGRESSORS, "ElasticNet": elastic_net, "two outputs": REGRESSORS["Lasso"]}[name]
        y = np.c_[Y, -2 * Y] if name == "two outputs" else Y
        return make(scale).set_params(fit_intercept=fit_intercept).fit(X, y * scale)

    model, expected = fitted(scale), fitted(1.0)
    precision = 1e-3 if name == "ElasticNet" and scale > 1e9 else 1e-9  # 1 - l1_ratio has few digits then
    np.testing.assert_allclose(model.coef_ / scale, expected.coef_, atol=precision)
    np.testing.assert_allclose(model.intercept_ / scale, expected.intercept_, atol=precision)
    np.testing.assert_allclose(
        model.history_[-1]["loss"] / scale**2, expected.history_[-1]["loss"], rtol=precision, atol=1e-20
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", REGRESSORS)
def test_units_of_y_have_no_effect_with_many_columns(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.ml.linear.coordinate_descent.MOST_COLUMNS", 10)  # so that OWL-QN goes on
    make = {**REGRESSORS, "ElasticNet": elastic_net}[name]
    model, expected = (make(each).fit(WIDE, WIDE_Y * each) for each in (scale, 1.0))
    precision = 1e-3 if name == "ElasticNet" and scale > 1e9 else 1e-5
    np.testing.assert_allclose(model.coef_ / scale, expected.coef_, atol=precision)
    assert model.score(WIDE, WIDE_Y * scale) > 0.99
    assert model.n_iter_ > 3


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rows", [X, WIDE], ids=["few", "many"])
def test_units_of_x_have_no_effect(rows: Any, scale: float) -> None:
    y = Y if rows is X else WIDE_Y
    model, expected = (ronde.ml.LinearRegression().fit(rows * each, y) for each in (scale, 1.0))
    np.testing.assert_allclose(model.coef_ * scale, expected.coef_, atol=1e-5)
    lasso = ronde.ml.Lasso(0.1 * scale).fit(rows * scale, y)
    np.testing.assert_allclose(lasso.coef_ * scale, ronde.ml.Lasso(0.1).fit(rows, y).coef_, atol=1e-5)
    ridge = ronde.ml.Ridge(scale**2).fit(rows * scale, y)
    np.testing.assert_allclose(ridge.coef_ * scale, ronde.ml.Ridge(1.0).fit(rows, y).coef_, atol=1e-5)


@pytest.mark.parametrize("scale", [1e160, 1e-170])
@pytest.mark.parametrize("make", [np.asarray, csr_array])
@pytest.mark.parametrize("name", [*REGRESSORS, "many columns", *CLASSIFIERS])
def test_numbers_whose_squares_are_no_numbers_are_refused(name: str, make: Any, scale: float) -> None:
    rows, y = (WIDE, WIDE_Y) if name == "many columns" else (X, Y)
    model: Any
    if name in CLASSIFIERS:
        model, y = CLASSIFIERS[name], (y > 0).astype(float)
    else:
        model = REGRESSORS.get(name, REGRESSORS["Ridge"])(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            ValueError, match="squares overflow: divide" if scale > 1 else "squares vanish: divide"
        ):
            model.fit(make(rows * scale), y)


@pytest.mark.parametrize("name", REGRESSORS)
def test_targets_whose_squares_overflow_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="squares overflow"):
        REGRESSORS[name](1.0).fit(X, Y * 1e160)


@pytest.mark.parametrize("scale", [1, 1e7, 1e-7])
def test_all_levels_of_a_factor_beside_large_amounts(scale: float) -> None:
    levels, amounts = np.eye(3)[random.integers(0, 3, 400)], random.lognormal(size=400)
    y = levels @ [1.0, 5.0, -3.0] + amounts
    model = ronde.ml.LinearRegression().fit(np.c_[levels, amounts * scale], y)
    assert model.score(np.c_[levels, amounts * scale], y) > 1 - 1e-12
    np.testing.assert_allclose(model.coef_[:3], [0, 4, -4], atol=1e-6)
    np.testing.assert_allclose(model.coef_[3] * scale, 1, rtol=1e-6)


def test_polynomials_whose_powers_nearly_depend() -> None:
    """Powers 1 to 10 of numbers from -9 to -3, as in NIST's Filip: the condition number is 1e14."""
    x = np.random.default_rng(0).uniform(-9, -3, 82)
    powers = np.stack([x**power for power in range(1, 11)], axis=1)
    y = powers @ np.full(10, 1e-3)
    predicted = ronde.ml.LinearRegression().fit(powers, y).predict(powers)
    np.testing.assert_allclose(predicted, y, atol=1e-9 * np.abs(y).max())


def test_a_lasso_of_strongly_correlated_columns_reaches_its_minimum() -> None:
    base = random.normal(size=(200, 1))
    rows = base + 1e-4 * random.normal(size=(200, 8))
    y = rows @ np.arange(8.0) + 0.1 * random.normal(size=200)
    model = ronde.ml.Lasso(1e-3, tol=1e-10).fit(rows, y)
    gradient = rows.T @ (rows @ model.coef_ + model.intercept_ - y) / 200
    violations = np.where(
        model.coef_ == 0, np.abs(gradient) - 1e-3, np.abs(gradient + 1e-3 * np.sign(model.coef_))
    )
    assert violations.max() < 1e-8 * y.std()


@pytest.mark.parametrize("make", [np.asarray, csr_array, np.float32])
def test_a_lasso_of_more_columns_than_rows_fulfills_the_conditions_of_its_minimum(make: Any) -> None:
    random = np.random.default_rng(3)
    rows = random.normal(size=(80, 1500)) * random.uniform(0.1, 10, 1500)
    y = rows[:, :10] @ random.normal(size=10) + random.normal(size=80)
    for alpha in (1.0, 0.1):
        model = ronde.ml.Lasso(alpha).fit(make(rows), y, sample_weight=np.linspace(0.5, 1.5, 80))
        weights = np.linspace(0.5, 1.5, 80) / 80
        residuals = (make(rows) @ model.coef_.astype(float) + model.intercept_ - y) * weights
        gradient = (rows - np.average(rows, axis=0, weights=weights)).T @ residuals / rows.std(axis=0)
        limit = alpha / rows.std(axis=0)
        violations = np.where(
            model.coef_ == 0, np.abs(gradient) - limit, np.abs(gradient + limit * np.sign(model.coef_))
        )
        assert violations.max() < (1e-4 if make is np.float32 else 1e-5) * y.std()
        assert 5 < np.count_nonzero(model.coef_) < 90


def test_columns_of_any_scale_take_few_steps_of_logistic_regression() -> None:
    rows, classes = load_breast_cancer(return_X_y=True)
    model = ronde.ml.LogisticRegression(max_iter=1000).fit(rows, classes)
    assert model.n_iter_ < 600  # scikit-learn: 2,338
    scores = model.decision_function(rows)
    slopes = -1 / (1 + np.exp(np.where(classes, scores, -scores))) * np.where(classes, 1, -1)
    gradient = (rows.T @ slopes + model.coef_[0]) / len(rows)
    assert np.abs(gradient).max() < 2e-3


@pytest.mark.parametrize("l1_ratio", [1.0, 0.4])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_dual_gap_bounds_the_distance_to_the_minimum(l1_ratio: float, is_weighted: bool) -> None:
    random = np.random.default_rng(4)
    X = random.normal(size=(60, 20)) @ random.normal(size=(20, 20)) * 7 + 3
    y = X[:, :2] @ [[1.0, 0.0], [2.0, -3.0]] + random.normal(size=(60, 2))
    weights = random.uniform(0.5, 2, 60) if is_weighted else np.ones(60)

    def objectives(model: Any) -> Any:
        squares = np.average((model.predict(X) - y) ** 2, axis=0, weights=weights) / 2
        l1, l2 = np.abs(model.coef_).sum(axis=1), (model.coef_**2).sum(axis=1) / 2
        return squares + 0.5 * (l1_ratio * l1 + (1 - l1_ratio) * l2)

    exact = ronde.ml.ElasticNet(0.5, l1_ratio=l1_ratio, tol=1e-12).fit(X, y, weights)
    assert exact.dual_gap_.shape == (2,)
    assert (exact.dual_gap_ < 1e-9).all()
    for tol in (0.3, 0.03, 1e-3):
        coarse = ronde.ml.ElasticNet(0.5, l1_ratio=l1_ratio, tol=tol).fit(X, y, weights)
        excess = objectives(coarse) - objectives(exact)
        assert (coarse.dual_gap_ >= excess - 1e-12).all()
        assert (coarse.dual_gap_ > 0).any()
    assert isinstance(ronde.ml.ElasticNet(0.5).fit(X, y[:, 0]).dual_gap_, float)


def test_the_dual_gap_is_that_of_the_dual_problem() -> None:
    """For residuals r of centered targets t: t.v - v.v / 2, as means, at the largest v = c r with |X'v| <= alpha."""
    random = np.random.default_rng(5)
    X = random.normal(size=(50, 8)) * [1, 2, 3, 4, 5, 6, 7, 8]
    y = X @ random.normal(size=8) + random.normal(size=50)
    with pytest.warns(ConvergenceWarning):
        model = ronde.ml.Lasso(0.5, max_iter=1, tol=0.0).fit(X, y)
    rest, columns = y - model.predict(X), X - X.mean(axis=0)
    objective = (rest**2).mean() / 2 + 0.5 * np.abs(model.coef_).sum()
    v = rest * min(1.0, 0.5 / np.abs(columns.T @ rest / 50).max())
    assert model.dual_gap_ == pytest.approx(
        objective - ((y - y.mean()) * v).mean() + (v**2).mean() / 2, rel=1e-6
    )
