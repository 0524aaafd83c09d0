"""What scikit-learn's checks do not cover, for all estimators of `ronde.ml`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from scipy.sparse import csr_array
from sklearn.base import is_classifier
from sklearn.callback import ScoringMonitor
from sklearn.callback._callback_context import _cached_signature

import ronde.ml
from ronde.ml import ESTIMATORS, load

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 4)) + 3 * rng.integers(0, 3, size=(200, 1))
Y = X @ [1.0, -2.0, 0.5, 3.0] + rng.normal(size=200)
CLASSES = np.digitize(Y, np.quantile(Y, [0.3, 0.7]))

every_estimator = pytest.mark.parametrize("name", sorted(ESTIMATORS))


def made(name: str) -> tuple[Any, Any, Any]:
    """Return an estimator, its X and y."""
    model = getattr(ronde.ml, name)()
    rows = abs(X) if model.__sklearn_tags__().input_tags.positive_only else X
    return model, rows, CLASSES if is_classifier(model) else Y


def predictions(model: Any, rows: Any) -> Any:
    return model.predict(rows) if hasattr(model, "predict") else model.transform(rows)


def score(estimator: Any, X: Any, y: Any) -> dict[str, float]:
    return {"score": float(estimator.score(X, y))}


@every_estimator
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_scikit_learns_monitor_gets_a_score_after_each_step(name: str) -> None:
    monitor = ScoringMonitor(scoring=score)
    model, rows, y = made(name)
    model.set_callbacks(monitor).fit(rows, y)
    scores = [row["score"] for row in monitor.get_logs().data if row["task_name"] == "step"]
    assert len(scores) == len(model.history_) > 0
    assert np.isfinite(scores).all()
    assert scores[-1] == pytest.approx(model.score(rows, y), rel=1e-3)
    _cached_signature.cache_clear()  # scikit-learn's cache keeps the monitor, and that its socket
    del monitor, model
    gc.collect()


@every_estimator
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_history_has_a_plot(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="Matplotlib is not installed here")
    matplotlib.use("agg")
    model, rows, y = made(name)
    history = model.fit(rows, y).history_
    value = "loss" if "loss" in history[-1] else "leaves"  # of forests
    (line,) = history.plot(value).lines
    assert line.get_ydata().tolist() == [record[value] for record in history]


@every_estimator
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_loaded_estimator_predicts_the_same(name: str, tmp_path: Path) -> None:
    model, rows, y = made(name)
    model.fit(rows, y).save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert vars(other).keys() >= {key for key in vars(model) if key.endswith("_")}
    assert np.array_equal(predictions(other, rows), predictions(model, rows))
    assert other.history_ == model.history_


@pytest.mark.parametrize("name", ["LinearSVC", "LogisticRegression", "Perceptron"])
@pytest.mark.parametrize("form", [np.asarray, csr_array])
def test_coefficients_may_be_sparse(name: str, form: Any) -> None:
    X, y = form(np.eye(30, 5) + np.eye(30, 5, 1)), np.arange(30) % 3
    model = getattr(ronde.ml, name)(on="threads:1").fit(X, y)
    scores = model.decision_function(X)
    assert hasattr(model.sparsify().coef_, "tocsr")
    np.testing.assert_allclose(model.decision_function(X), scores)
    assert type(model.sparsify().densify().densify().coef_) is np.ndarray
    np.testing.assert_array_equal(model.decision_function(X), scores)


def test_ridge_names_its_solver() -> None:
    X = np.eye(4)
    assert ronde.ml.Ridge(on="threads:1").fit(X, X.sum(axis=1)).solver_ == "cholesky"
    assert ronde.ml.Ridge(solver="sag", on="threads:1").fit(X, X.sum(axis=1)).solver_ == "sag"
    assert ronde.ml.Ridge(on="threads:1").fit(np.eye(3, 1001), np.arange(3)).solver_ == "lbfgs"


@pytest.mark.parametrize("name", ["Lasso", "ElasticNet"])
def test_no_penalty_warns_as_in_scikit_learn(name: str) -> None:
    X = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.warns(UserWarning, match="With alpha=0, this algorithm does not converge well"):
        getattr(ronde.ml, name)(alpha=0, on="threads:1").fit(X, X.sum(axis=1))


def test_set_params_gives_the_advice_of_the_constructor() -> None:
    advice = (
        r"LinearRegression has no parameter 'n_jobs', unlike scikit-learn's: `on` says where the tasks run"
    )
    with pytest.raises(TypeError, match=advice):
        ronde.ml.LinearRegression(n_jobs=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=advice):
        ronde.ml.LinearRegression().set_params(n_jobs=2)
    with pytest.raises(ValueError, match="Invalid parameter 'n_job'"):
        ronde.ml.LinearRegression().set_params(n_job=2)
