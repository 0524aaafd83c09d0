"""What programs written for scikit-learn rely on: parameters, shapes and types, for all estimators of `ronde.ml`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import sklearn.cluster
import sklearn.decomposition
import sklearn.ensemble
import sklearn.linear_model
import sklearn.svm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

import ronde.ml
from ronde.ml import ESTIMATORS

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.3 + 0.1 * rng.normal(size=60)
REGRESSORS = ["LinearRegression", "Ridge", "Lasso", "ElasticNet"]
DOCS = Path(__file__).parents[3] / "docs" / "estimators.md"


def theirs(name: str) -> Any:
    if name.startswith("GradientBoosting"):
        return getattr(sklearn.ensemble, f"Hist{name}")
    modules = (sklearn.cluster, sklearn.decomposition, sklearn.ensemble, sklearn.linear_model, sklearn.svm)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def missing_parameters() -> list[tuple[str, str]]:
    """Those of scikit-learn that ours do not have."""
    return [
        (name, parameter)
        for name in sorted(ESTIMATORS)
        for parameter in inspect.signature(theirs(name)).parameters
        if parameter not in inspect.signature(getattr(ronde.ml, name)).parameters
    ]


@pytest.mark.parametrize(("name", "parameter"), missing_parameters())
def test_the_error_for_a_missing_parameter_says_what_to_do(name: str, parameter: str) -> None:
    with pytest.raises(
        TypeError, match=f"^{name} has no parameter '{parameter}', unlike scikit-learn's: .{{20,}}"
    ):
        getattr(ronde.ml, name)(**{parameter: None})
    assert f"`{parameter}`" in DOCS.read_text()


def test_an_unknown_parameter_is_an_ordinary_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'alhpa'"):
        ronde.ml.Ridge(alhpa=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_parameters_have_scikit_learns_defaults(name: str) -> None:
    differs = {"init", "learning_method", "tol", "max_iter", "n_iter_no_change", "verbose"}
    ours, other = (inspect.signature(kind).parameters for kind in (getattr(ronde.ml, name), theirs(name)))
    for parameter in other.keys() & ours.keys():
        assert ours[parameter].kind == other[parameter].kind
        assert parameter in differs or ours[parameter].default == other[parameter].default


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("KMeans", {"algorithm": "elkan", "random_state": 0}),
        ("Ridge", {"solver": "svd", "random_state": 0}),
        ("Lasso", {"random_state": 0}),
        ("LogisticRegression", {"solver": "saga", "random_state": 0}),
        ("LinearSVC", {"dual": False, "random_state": 0}),
        ("Perceptron", {"random_state": 0}),
    ],
)
def test_parameters_that_change_no_result_of_scikit_learn_change_none_here(name: str, params: Any) -> None:
    kind, y = getattr(ronde.ml, name), Y if name in REGRESSORS else Y > 0
    plain = {"random_state": 0} if name == "KMeans" else {}
    model, other = kind(**params).fit(X, y), kind(**plain).fit(X, y)
    attribute = "cluster_centers_" if name == "KMeans" else "coef_"
    np.testing.assert_array_equal(getattr(model, attribute), getattr(other, attribute))
    assert clone(model).get_params() == model.get_params()


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("y", [Y, Y[:, None], np.stack([Y, X[:, 0]], axis=1)], ids=["flat", "column", "two"])
@pytest.mark.parametrize("name", REGRESSORS)
def test_shapes_and_types_of_a_regression(name: str, y: Any, fit_intercept: bool, dtype: str) -> None:
    models = [
        kind(fit_intercept=fit_intercept).fit(X.astype(dtype), y.astype(dtype))
        for kind in (getattr(ronde.ml, name), theirs(name))
    ]
    for value in ("coef_", "intercept_"):
        ours, other = (getattr(model, value) for model in models)
        assert (type(ours), np.shape(ours)) == (type(other), np.shape(other))
        assert getattr(ours, "dtype", None) == getattr(other, "dtype", None)
        np.testing.assert_allclose(ours, other, atol=1e-3)
    ours, other = (model.predict(X.astype(dtype)) for model in models)
    assert (ours.shape, ours.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("name", ["Lasso", "ElasticNet"])
def test_several_outputs_are_as_many_models(name: str) -> None:
    kind = getattr(ronde.ml, name)
    both = np.stack([Y, 3 * X[:, 1] - Y], axis=1)
    model = kind(alpha=0.05, tol=1e-9).fit(X, both)
    alone = [kind(alpha=0.05, tol=1e-9).fit(X, y) for y in both.T]
    np.testing.assert_allclose(model.coef_, [each.coef_ for each in alone], atol=1e-7)
    np.testing.assert_allclose(model.intercept_, [each.intercept_ for each in alone], atol=1e-7)
    np.testing.assert_array_equal(model.sparse_coef_.toarray(), model.coef_)
    assert len(kind(alpha=0.05, warm_start=True).fit(X, both).fit(X, both).history_) <= 1


@pytest.mark.parametrize("y", [Y, np.digitize(Y, [-1.0, 1.0])], ids=["two classes", "three"])
@pytest.mark.parametrize("solver", ["newton-cg", "newton-cholesky"])
def test_newtons_method_finds_the_same_probabilities_in_fewer_steps(solver: str, y: Any) -> None:
    y = y if y.dtype.kind == "i" else y > 0
    model = ronde.ml.LogisticRegression(solver=solver, tol=1e-9).fit(X, y)
    other = ronde.ml.LogisticRegression(tol=1e-9, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(model.coef_, other.coef_, atol=1e-6)
    assert model.n_iter_[0] < other.n_iter_[0]
    with pytest.raises(
        ValueError, match=f"solver='{solver}' needs l1_ratio=0.0, and it is 0.5: leave solver out"
    ):
        ronde.ml.LogisticRegression(solver=solver, l1_ratio=0.5).fit(X, y)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [*REGRESSORS, "KMeans", "MiniBatchKMeans"])
def test_numbers_whose_squares_overflow_are_an_error(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{name}: the loss is .* sums of their squares overflow: divide them"
    ):
        getattr(ronde.ml, name)().fit(X * 1e200, Y * 1e200)


@pytest.mark.parametrize("name", ["Lasso", "ElasticNet", "LogisticRegression", "LinearSVC"])
@pytest.mark.filterwarnings("error::sklearn.exceptions.ConvergenceWarning")
def test_a_tolerance_below_the_precision_of_float32_is_no_reason_to_warn(name: str) -> None:
    kind, y = getattr(ronde.ml, name), Y if name in REGRESSORS else Y > 0
    params = {"alpha": 0.01} if name in REGRESSORS else {}
    model = kind(tol=1e-12, max_iter=1000, **params).fit(X.astype("f4"), y)
    exact = kind(tol=1e-9, max_iter=1000, **params).fit(X, y)
    np.testing.assert_allclose(model.coef_, exact.coef_, atol=2e-3)


def test_the_warning_of_a_fit_that_ends_early_is_of_scikit_learns_class() -> None:
    with pytest.warns(ConvergenceWarning, match="has not converged"):
        ronde.ml.Lasso(alpha=0.01, max_iter=1, tol=1e-9).fit(X, Y)
