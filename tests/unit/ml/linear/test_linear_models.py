"""Linear models against scikit-learn's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import sklearn.linear_model
import sklearn.svm
from scipy.sparse import csr_array
from sklearn.callback import ScoringMonitor
from sklearn.callback._callback_context import _cached_signature
from sklearn.exceptions import ConvergenceWarning

import ronde.ml
from ronde.ml import load

random = np.random.default_rng(0)
X = random.normal(size=(300, 8)) * [1, 2, 1, 0.5, 1, 1, 2, 1] + 0.5
Y = X @ [1, 0, -2, 0, 3, 0, 0, 0.5] + 2 + random.normal(size=300)
WEIGHTS = random.uniform(0, 2, size=300)
BINARY = np.where(np.median(Y) < Y, "yes", "no")
THREE = np.digitize(Y, np.quantile(Y, [0.3, 0.7]))
TARGETS = {"numbers": Y, "two outputs": np.stack([Y, X[:, 0] - Y], axis=1), "binary": BINARY, "three": THREE}

PRECISE: dict[str, Any] = {"tol": 1e-9, "max_iter": 2000}
LOGISTIC: dict[str, Any] = {"tol": 1e-10, "max_iter": 20000}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "least squares": ("LinearRegression", {}, {}, "numbers"),
    "no intercept": ("LinearRegression", {"fit_intercept": False}, {}, "two outputs"),
    "ridge": ("Ridge", {"alpha": 20.0}, {}, "two outputs"),
    "lasso": ("Lasso", {"alpha": 0.3}, PRECISE, "numbers"),
    "elastic net": ("ElasticNet", {"alpha": 0.3, "l1_ratio": 0.7}, PRECISE, "numbers"),
    "binary": ("LogisticRegression", {"C": 0.5, "class_weight": "balanced"}, PRECISE, "binary"),
    "multinomial": ("LogisticRegression", {"class_weight": {0: 2, 2: 0.5}}, PRECISE, "three"),
    "l1 logistic": ("LogisticRegression", {"C": 0.03, "l1_ratio": 1.0}, PRECISE, "binary"),
    "svc": ("LinearSVC", {"fit_intercept": False, "C": 0.1}, PRECISE, "three"),
    "l1 svc": ("LinearSVC", {"fit_intercept": False, "C": 0.01, "penalty": "l1"}, PRECISE, "binary"),
}
THEIR_OPTIONS: dict[str, dict[str, Any]] = {
    "lasso": {"tol": 1e-14},
    "elastic net": {"tol": 1e-14},
    "binary": LOGISTIC,
    "multinomial": LOGISTIC,
    "l1 logistic": {**LOGISTIC, "solver": "saga"},
    "svc": LOGISTIC,
    "l1 svc": {**LOGISTIC, "dual": False},
}


def fitted(model: Any, rows: Any, target: str, weights: Any) -> Any:
    return model.fit(rows, TARGETS[target], sample_weight=weights)


@pytest.mark.parametrize("name", MODELS)
def test_coefficients_are_those_of_scikit_learn(name: str) -> None:
    kind, params, options, target = MODELS[name]
    theirs_of = getattr(sklearn.svm if kind == "LinearSVC" else sklearn.linear_model, kind)
    theirs = fitted(theirs_of(**params, **THEIR_OPTIONS.get(name, {})), X, target, WEIGHTS)
    for rows in (X, csr_array(X)):
        ours = fitted(getattr(ronde.ml, kind)(**params, **options), rows, target, WEIGHTS)
        np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=0, atol=1e-6)
        assert ((ours.coef_ == 0) == (theirs.coef_ == 0)).all()
        assert ours.coef_.shape == theirs.coef_.shape
        if hasattr(ours, "classes_"):
            np.testing.assert_array_equal(ours.predict(rows), theirs.predict(rows))
        if kind == "LogisticRegression":
            np.testing.assert_allclose(ours.predict_proba(rows), theirs.predict_proba(rows), atol=1e-6)
            np.testing.assert_allclose(
                ours.predict_log_proba(rows), theirs.predict_log_proba(rows), atol=1e-5
            )


def test_columns_that_follow_from_others_share_the_least_coefficients() -> None:
    rows = np.hstack([X, X[:, :1] + X[:, 1:2]])
    ours = ronde.ml.LinearRegression().fit(rows, Y)
    theirs = sklearn.linear_model.LinearRegression().fit(rows, Y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)


def test_badly_scaled_columns_are_no_harder() -> None:
    scales = 10.0 ** np.arange(-4, 4)
    ours = ronde.ml.LinearRegression().fit(X * scales + 100 * scales, Y)
    theirs = sklearn.linear_model.LinearRegression().fit(X, Y)
    np.testing.assert_allclose(ours.coef_ * scales, theirs.coef_, atol=1e-9)


@pytest.mark.parametrize("kind", ["Lasso", "ElasticNet"])
def test_means_and_scales_of_columns_do_not_add_steps(kind: str) -> None:
    scales = 10.0 ** np.linspace(-2, 2, 8)
    rows = (X + 1000) * scales
    for each in (rows, csr_array(rows)):
        ours = getattr(ronde.ml, kind)(alpha=0.1, tol=1e-8).fit(each, Y, WEIGHTS)
        theirs = getattr(sklearn.linear_model, kind)(alpha=0.1, tol=1e-14, max_iter=100_000)
        theirs.fit(rows, Y, WEIGHTS)
        assert ours.n_iter_ < 20
        assert (ours.coef_ == 0).any()
        assert ((ours.coef_ == 0) == (theirs.coef_ == 0)).all()
        np.testing.assert_allclose(ours.coef_ * scales, theirs.coef_ * scales, atol=1e-6)


@pytest.mark.filterwarnings("ignore:LogisticRegression has not converged")
@pytest.mark.parametrize("scale", [1e6, 1e8])
def test_a_classifier_finds_the_length_of_its_first_step_with_large_columns(scale: float) -> None:
    rows = (X - X.mean(axis=0)) * [1, 1, scale, 1, 1, 1, 1, 1]
    scores = [
        ronde.ml.LogisticRegression(max_iter=200).fit(each, BINARY).score(each, BINARY) for each in (X, rows)
    ]
    assert scores[1] > scores[0] - 0.03


def test_many_columns_take_another_way_to_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ridge = ronde.ml.Ridge(alpha=3.0, tol=1e-9)
    few = ridge.fit(X, TARGETS["two outputs"]).coef_
    monkeypatch.setattr("ronde.ml.linear.least_squares.MOST_COLUMNS", 3)
    many = ridge.fit(X, TARGETS["two outputs"])
    np.testing.assert_allclose(many.coef_, few, atol=1e-6)
    assert many.n_iter_ > 3


@pytest.mark.parametrize("make", [np.asarray, csr_array])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_of_many_columns_and_few_rows_the_least_coefficients_count(make: Any, is_weighted: bool) -> None:
    random = np.random.default_rng(0)
    rows, y = random.normal(size=(50, 1100)) + 5, random.normal(size=(50, 2)) + 3
    weights = random.uniform(1, 2, size=50) if is_weighted else None
    theirs = sklearn.linear_model.LinearRegression().fit(rows, y, weights)
    models = [
        ronde.ml.LinearRegression(tol=1e-9, on=f"threads:{tasks}").fit(make(rows), y, weights)
        for tasks in (1, 2)
    ]
    np.testing.assert_allclose(models[0].coef_, theirs.coef_, atol=1e-8)
    np.testing.assert_allclose(models[0].intercept_, theirs.intercept_, atol=1e-6)
    assert models[0].coef_.tobytes() == models[1].coef_.tobytes()


def test_a_warm_start_continues() -> None:
    model = ronde.ml.LogisticRegression(tol=1e-8, max_iter=1000, warm_start=True)
    first = model.fit(X, THREE).n_iter_
    assert model.fit(X, THREE).n_iter_ < first / 2


@pytest.mark.parametrize(
    ("rows", "y", "expected"), [(X, BINARY, r"\(1, 8\)"), (X[:, :5], THREE, r"\(3, 5\)")]
)
def test_a_warm_start_needs_the_same_classes_and_columns(rows: Any, y: Any, expected: str) -> None:
    model = ronde.ml.LogisticRegression(warm_start=True).fit(X, THREE)
    with pytest.raises(ValueError, match=rf"the shape \(3, 8\), and these classes .* need {expected}"):
        model.fit(rows, y)


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"), [(X, 2, r"\(2, 8\)"), (X[:, :5], 0, r"\(5,\)"), (X[:, :1], 0, r"\(1,\)")]
)
def test_a_warm_start_of_a_regression_needs_the_same_outputs_and_columns(
    rows: Any, outputs: int, expected: str
) -> None:
    model = ronde.ml.ElasticNet(warm_start=True).fit(X, X[:, 0])
    with pytest.raises(ValueError, match=rf"the shape \(8,\), and these outputs .* need {expected}"):
        model.fit(rows, X[:, :outputs] if outputs else X[:, 0])
    assert model.fit(X, X[:, :1]).coef_.shape == (8,)


@pytest.mark.parametrize("name", ["Lasso", "ElasticNet"])
@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_a_warm_start_of_a_regression_may_change_the_intercepts(name: str, outputs: int) -> None:
    y = X[:, :outputs] + 3 if outputs else X[:, 0] + 3
    kind = getattr(ronde.ml, name)
    model = kind(0.01, warm_start=True, fit_intercept=False, tol=1e-9).fit(X, y)
    for fit_intercept in (True, False, True):
        model.set_params(fit_intercept=fit_intercept).fit(X, y)
        alone = kind(0.01, fit_intercept=fit_intercept, tol=1e-9).fit(X, y)
        np.testing.assert_allclose(model.coef_, alone.coef_, atol=1e-6)
        np.testing.assert_allclose(model.intercept_, alone.intercept_, atol=1e-6)


@pytest.mark.parametrize("name", ["Lasso", "LogisticRegression", "Perceptron"])
def test_a_warm_start_takes_lists(name: str) -> None:
    kind = getattr(ronde.ml, name)
    y = Y if name == "Lasso" else THREE
    model, expected = (kind(warm_start=True).fit(X, y) for _ in range(2))
    model.coef_, model.intercept_ = model.coef_.tolist(), model.intercept_.tolist()
    assert model.fit(X, y).coef_.tobytes() == expected.fit(X, y).coef_.tobytes()
    model.coef_ = [1.0]
    with pytest.raises(
        ValueError, match=r"cannot start from the earlier fit: its coef_ has the shape \(1,\)"
    ):
        model.fit(X, y)


@pytest.mark.parametrize(
    "name", ["Lasso", "LogisticRegression", "LinearSVC", "Perceptron", "KMeans", "MiniBatchKMeans"]
)
def test_a_number_of_steps_may_come_from_an_array(name: str) -> None:
    X = np.random.default_rng(0).normal(size=(60, 3))
    model = getattr(ronde.ml, name)(max_iter=np.arange(100, 200, 100)[0]).fit(X, X[:, 0] > 0)
    assert 1 <= model.n_iter_ <= 100


def test_a_fit_that_has_not_converged_warns() -> None:
    with pytest.warns(
        ConvergenceWarning, match=r"LogisticRegression has not converged in 2 steps.*max_iter \(2\)"
    ):
        ronde.ml.LogisticRegression(max_iter=2, tol=1e-9).fit(X, BINARY)


def test_a_monitor_gets_the_score_after_each_step() -> None:
    monitor = ScoringMonitor(scoring="accuracy")
    model = ronde.ml.LogisticRegression().set_callbacks(monitor).fit(X, BINARY)
    scores = [row["accuracy"] for row in monitor.get_logs().data if row["task_name"] == "step"]
    assert len(scores) == model.n_iter_ == len(model.history_)
    assert scores[-1] == model.score(X, BINARY)
    _cached_signature.cache_clear()  # scikit-learn's cache keeps the monitor, and that its socket
    del monitor, model
    gc.collect()


def test_verbose_prints_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = ronde.ml.Ridge(verbose=1).fit(X, Y)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == model.n_iter_
    assert lines[-1].startswith(f"Ridge: step {model.n_iter_}, loss ")


@pytest.mark.parametrize("name", ["ridge", "l1 logistic", "multinomial"])
def test_a_saved_model_predicts_the_same(name: str, tmp_path: Path) -> None:
    kind, params, options, target = MODELS[name]
    model = fitted(getattr(ronde.ml, kind)(**params, **options), X, target, None)
    model.save(tmp_path / "model")
    other = load(tmp_path / "model")
    np.testing.assert_array_equal(other.predict(X), model.predict(X))
    assert other.get_params() == model.get_params()
    assert other.history_ == model.history_


def test_only_one_class() -> None:
    with pytest.raises(ValueError, match=r"y has only one class, 'no'"):
        ronde.ml.LinearSVC().fit(X, ["no"] * len(X))


@pytest.mark.parametrize("class_weight", ["balanced", {0: 5.0, 1: 0.5}])
@pytest.mark.parametrize("target", ["binary", "three"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_weights_of_classes_count_in_a_support_vector_machine_as_in_scikit_learns(
    class_weight: Any, target: str, is_weighted: bool, penalty: str
) -> None:
    y = (TARGETS[target] == "yes").astype(int) if target == "binary" else TARGETS[target]
    params = {"C": 0.1, "fit_intercept": False, "class_weight": class_weight, "penalty": penalty}
    theirs = sklearn.svm.LinearSVC(dual=False, tol=1e-9, max_iter=20000, **params)
    theirs.fit(X, y, WEIGHTS if is_weighted else None)
    ours = ronde.ml.LinearSVC(**PRECISE, **params).fit(X, y, WEIGHTS if is_weighted else None)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=0, atol=1e-5)


def test_the_weight_of_an_unknown_class() -> None:
    with pytest.raises(ValueError, match=r"class_weight has \[7\], and the classes are \[0, 1, 2\]"):
        ronde.ml.LogisticRegression(class_weight={7: 1.0}).fit(X, THREE)


def parquet(tmp_path: Path, memory_limit: int | None, parts: str, bad: bool = False) -> Any:
    """The data above as a file; in parts, some of which may be left out."""
    pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")
    from pyarrow.parquet import write_table

    from ronde.comqueue import read

    features = {f"x{number}": column for number, column in enumerate(X.T)}
    table = {**features, "three": THREE, "y": np.where(bad, np.nan, Y), "weight": WEIGHTS}
    write_table(pa.table(table), tmp_path / "rows.parquet", row_group_size=70)
    named = {"X": list(features), "y": "three", "sample_weight": "weight"}
    columns = {name: each for name, each in named.items() if name in parts.split()}
    return read(
        tmp_path / "rows.parquet", {**columns, **({"y": "y"} if bad else {})}, memory_limit=memory_limit
    )


@pytest.mark.parametrize("memory_limit", [None, 10_000])
def test_rows_of_a_file_give_the_same_model(tmp_path: Path, memory_limit: int | None) -> None:
    model = ronde.ml.LogisticRegression(class_weight="balanced")
    expected = model.fit(X, THREE, WEIGHTS)
    coef = expected.coef_
    found = model.fit(parquet(tmp_path, memory_limit, "X y sample_weight"))
    np.testing.assert_allclose(found.coef_, coef, atol=1e-10)
    assert found.n_features_in_ == 8


def test_a_source_without_targets_or_with_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"requires y, and the rows of .* have only X: name it"):
        ronde.ml.Ridge().fit(parquet(tmp_path, None, "X"))
    with pytest.raises(ronde.RemoteError, match="y contains NaN or infinity"):
        ronde.ml.Ridge().fit(parquet(tmp_path, None, "X y", bad=True))
    with pytest.raises(ValueError, match="X is a source of rows, and y or sample_weight is not None"):
        ronde.ml.Ridge().fit(parquet(tmp_path, None, "X y"), Y)
