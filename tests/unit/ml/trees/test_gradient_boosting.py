"""Gradient boosting: its models against scikit-learn's, and what is special about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss

from ronde.comqueue import read
from ronde.data.rows import NamedArrays
from ronde.errors import UsageError
from ronde.ml import GradientBoostingClassifier, GradientBoostingRegressor, load, saving
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.trees import NODE_KINDS, add_shap_values, joined_trees

rng = np.random.default_rng(0)
X = rng.normal(size=(400, 5))
Y = X[:, 0] * X[:, 1] + np.abs(X[:, 2]) + 0.1 * rng.normal(size=400)
CLASSES = np.digitize(Y, [0.0, 1.0])


def trees_of(model: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model.trees_.items()}


def squared(y: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> Any:
    """Half the square, as a loss of a user's."""
    errors = scores - y
    return errors, np.ones_like(errors), errors**2 / 2


LOSSES = ["squared_error", "absolute_error", "quantile", "huber", "poisson", "gamma", "tweedie", squared]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tasks", [2, 3, 4])
def test_tasks_give_the_bits_of_one(loss: Any, tasks: int) -> None:
    def fit(on: str) -> Any:
        model = GradientBoostingRegressor(
            loss, quantile=0.3, max_iter=4, subsample=0.8, max_features=0.6, random_state=0, on=on
        )
        return model.fit(X, np.exp(Y), np.abs(X[:, 4]))

    one, several = fit("threads:1"), fit(f"threads:{tasks}")
    assert trees_of(several) == trees_of(one)
    assert several.train_score_.tobytes() == one.train_score_.tobytes()


def test_tasks_give_the_bits_of_one_for_classes_and_early_stopping() -> None:
    models = [
        GradientBoostingClassifier(
            max_iter=60, early_stopping=True, n_iter_no_change=3, random_state=0, on=f"threads:{tasks}"
        ).fit(X, CLASSES)
        for tasks in (1, 3)
    ]
    assert 3 < models[0].n_iter_ < 60
    assert trees_of(models[0]) == trees_of(models[1])
    assert len(models[0].validation_score_) == models[0].n_iter_ + 1


@pytest.mark.slow
def test_probabilities_are_as_good_as_scikit_learns() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    data, classes = load_breast_cancer(return_X_y=True)
    train = np.arange(len(data)) % 3 > 0
    losses = [
        log_loss(classes[~train], kind().fit(data[train], classes[train]).predict_proba(data[~train]))
        for kind in (GradientBoostingClassifier, HistGradientBoostingClassifier)
    ]
    assert losses[0] < losses[1] * 1.15


def test_numbers_are_as_good_as_scikit_learns() -> None:
    data, y = load_diabetes(return_X_y=True)
    train = np.arange(len(data)) % 3 > 0
    model = GradientBoostingRegressor(max_iter=60).fit(data[train], y[train])
    assert model.score(data[~train], y[~train]) > 0.37  # HistGradientBoostingRegressor: 0.38


def test_a_single_tree_is_that_of_scikit_learn() -> None:
    from sklearn.tree import DecisionTreeRegressor

    whole = np.round(X, 1)
    tree = DecisionTreeRegressor(max_leaf_nodes=9, min_samples_leaf=5, random_state=0).fit(whole, Y)
    model = GradientBoostingRegressor(
        learning_rate=1.0, max_iter=1, max_leaf_nodes=9, min_samples_leaf=5, early_stopping=False
    ).fit(whole, Y)
    np.testing.assert_allclose(model.predict(whole), tree.predict(whole), rtol=1e-12)


def test_the_leaves_of_absolute_errors_are_medians() -> None:
    model = GradientBoostingRegressor(
        "absolute_error", learning_rate=1.0, max_iter=1, max_leaf_nodes=2, early_stopping=False
    ).fit(X, Y)
    predicted = model.predict(X)
    for value in np.unique(predicted):
        assert value == pytest.approx(np.median(Y[predicted == value]))


@pytest.mark.parametrize("factor", [1e-40, 1e-24, 1e20, 1e60])
def test_the_scale_of_the_targets_does_not_matter(factor: float) -> None:
    plain = GradientBoostingRegressor(max_iter=5, tol=0).fit(X, Y)
    scaled = GradientBoostingRegressor(max_iter=5, tol=0).fit(X, Y * factor)
    np.testing.assert_allclose(scaled.predict(X) / factor, plain.predict(X), rtol=1e-6)


def test_missing_values_go_to_the_better_side() -> None:
    data = X.copy()
    data[::3, 0] = np.nan
    model = GradientBoostingRegressor(max_iter=30).fit(data, np.isnan(data[:, 0]) + 0.0)
    assert np.abs(model.predict(data) - np.isnan(data[:, 0])).max() < 0.1


def test_categories_split_by_their_means() -> None:
    categories = rng.integers(0, 20, size=(1000, 1)).astype(float)
    y = (categories[:, 0] % 2) + 0.0
    model = GradientBoostingRegressor(
        learning_rate=1.0, max_iter=1, max_leaf_nodes=2, categorical_features=[0], early_stopping=False
    ).fit(categories, y)
    np.testing.assert_allclose(model.predict(categories), y, atol=1e-12)
    assert model.predict([[99.0], [np.nan]]).shape == (2,)  # unknown ones count as missing


def test_categories_of_data_frames_are_texts(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    names = np.array(["red", "green", "blue", "white"])[rng.integers(0, 4, size=400)]
    frame = pandas.DataFrame({"color": names, "size": X[:, 0]})
    y = np.where((names == "red") | (names == "white"), 1.0, 0.0)
    by_name = GradientBoostingRegressor(max_iter=5, categorical_features=["color"]).fit(frame, y)
    by_dtype = GradientBoostingRegressor(max_iter=5).fit(frame.astype({"color": "category"}), y)
    assert trees_of(by_name) == trees_of(by_dtype)
    assert np.asarray(by_name.is_categorical_).tolist() == [True, False]
    by_name.save(tmp_path / "model")
    assert np.array_equal(load(tmp_path / "model").predict(frame), by_dtype.predict(frame))
    assert len(np.unique(by_name.predict(frame.assign(color="unknown", size=0.0)))) == 1


def test_categories_may_be_texts_and_numbers() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    names = np.array([7, "red", 2.5], dtype=object)[rng.integers(0, 3, size=400)]
    y = (names == "red") + 0.0
    frame = pandas.DataFrame({"kind": names})
    model = GradientBoostingRegressor(max_iter=30, categorical_features=["kind"]).fit(frame, y)
    assert np.abs(model.predict(frame) - y).max() < 0.1
    with pytest.raises(ValueError, match="'kind' have the same text"):
        model.fit(frame.replace({2.5: "7"}), y)


def test_a_second_fit_keeps_the_categories_of_the_first() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    names = np.array(["red", "green", "white"])[rng.integers(0, 3, size=400)]
    frame = pandas.DataFrame({"color": names, "size": X[:, 0]}).astype({"color": "category"})
    y = (names == "red") + 0.0
    model = GradientBoostingRegressor(max_iter=5, warm_start=True).fit(frame, y)
    before = model.predict(frame)
    more = frame.assign(color=pandas.Categorical(np.where(names == "red", "blue", names)))
    with pytest.raises(ValueError, match="must be larger than or equal"):
        model.set_params(max_iter=1).fit(more, y)
    assert np.array_equal(model.predict(frame), before)
    model.set_params(max_iter=6).fit(more, y)
    assert model.categories_["color"].tolist() == ["green", "red", "white"]
    assert np.abs(model.predict(frame) - before).max() < 0.1
    with pytest.raises(ValueError, match="NaN"):
        model.set_params(warm_start=False).fit(more, np.full(400, np.nan))
    assert model.categories_["color"].tolist() == ["green", "red", "white"]


def test_infinite_values_have_bins() -> None:
    data = np.array([[-np.inf], [0.0], [1.0], [np.inf]]).repeat(50, axis=0)
    y = np.repeat([0.0, 1.0, 1.0, 0.0], 50)
    model = GradientBoostingRegressor(max_iter=1, learning_rate=1.0, early_stopping=False).fit(data, y)
    np.testing.assert_allclose(model.predict(data), y, atol=1e-12)


@pytest.mark.parametrize("sign", [-1, 1])
def test_monotone_constraints(sign: int) -> None:
    y = sign * X[:, 0] + np.sin(5 * X[:, 0]) + X[:, 1]
    model = GradientBoostingRegressor(monotonic_cst=[sign, 0, 0, 0, 0], max_iter=50).fit(X, y)
    grid = np.tile(X[:20], (50, 1, 1))
    grid[:, :, 0] = np.linspace(-3, 3, 50)[:, None]
    predicted = model.predict(grid.reshape(-1, 5)).reshape(50, 20)
    assert (sign * np.diff(predicted, axis=0) >= 0).all()
    assert (sign * np.diff(predicted, axis=0) > 0).any()


def test_a_warm_start_continues() -> None:
    whole = GradientBoostingClassifier(max_iter=8, random_state=0).fit(X, CLASSES)
    model = GradientBoostingClassifier(max_iter=3, warm_start=True, random_state=0).fit(X, CLASSES)
    model.set_params(max_iter=8).fit(X, CLASSES)
    assert trees_of(model) == trees_of(whole)
    assert [record["step"] for record in model.history_] == list(range(1, 9))
    assert model.train_score_.tobytes() == whole.train_score_.tobytes()
    with pytest.raises(ValueError, match="must be larger than or equal to n_iter_=8"):
        model.set_params(max_iter=2).fit(X, CLASSES)


def test_a_warm_start_holds_out_the_same_rows() -> None:
    def random() -> np.random.RandomState:
        return np.random.RandomState(7)

    rules: dict[str, Any] = {"early_stopping": True, "n_iter_no_change": 20}
    whole = GradientBoostingRegressor(max_iter=8, random_state=random(), **rules).fit(X, Y)
    model = GradientBoostingRegressor(max_iter=3, random_state=random(), warm_start=True, **rules).fit(X, Y)
    model.set_params(max_iter=8).fit(X, Y)
    assert trees_of(model) == trees_of(whole)


@pytest.mark.parametrize("fraction", [0.2, None])
def test_a_warm_start_of_a_fit_that_has_ended_ends_soon(fraction: float | None) -> None:
    rules: dict[str, Any] = {"early_stopping": True, "n_iter_no_change": 5, "tol": 0.05, "warm_start": True}
    model = GradientBoostingRegressor(max_iter=100, validation_fraction=fraction, **rules).fit(X, Y)
    steps = model.n_iter_
    assert 5 < steps < 100
    assert model.fit(X, Y).n_iter_ < steps + 5


def test_without_rows_held_out_they_have_no_loss(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"early_stopping": True, "n_iter_no_change": 50}
    for fraction, message in [(None, "no fraction"), (1e-9, "a fraction so small that no row is held out")]:
        model = GradientBoostingRegressor(max_iter=3, validation_fraction=fraction, **rules).fit(X, Y)
        assert model.train_score_.shape == (4,), message
        assert model.validation_score_.shape == (0,), message
        assert set(model.history_[0]) == {"step", "loss"}, message
        model.save(tmp_path / "model")
        assert load(tmp_path / "model").validation_score_.shape == (0,), message
    model.set_params(warm_start=True, validation_fraction=0.5, max_iter=5).fit(X, Y)
    assert [len(model.train_score_), len(model.validation_score_)] == [6, 3]
    model.set_params(validation_fraction=None, max_iter=6).fit(X, Y)
    assert [len(model.train_score_), len(model.validation_score_)] == [7, 3]
    model.save(tmp_path / "model")
    losses = [record["validation_loss"] for record in load(tmp_path / "model").history_]
    assert np.isnan(losses).tolist() == [True, True, True, False, False, True]


def test_a_weight_counts_as_that_many_rows() -> None:
    weights = rng.integers(0, 4, size=400)
    rules: dict[str, Any] = {
        "max_iter": 5,
        "min_samples_leaf": 1,
        "max_leaf_nodes": 8,
        "early_stopping": False,
    }
    weighted = GradientBoostingRegressor(**rules).fit(X, Y, weights)
    repeated = GradientBoostingRegressor(**rules).fit(np.repeat(X, weights, axis=0), np.repeat(Y, weights))
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X))


@pytest.mark.parametrize("weighted", [1, 200])  # of 200 blocks of rows
def test_rows_with_a_weight_have_bins_however_few_they_are(weighted: int) -> None:
    x = np.arange(400_000.0)[:, None] % 2000
    weights = np.zeros(len(x))
    weights[1000 : 2000 * weighted : 2000] = weights[1001 : 2000 * weighted : 2000] = 1
    y = x[:, 0] % 2
    model = GradientBoostingRegressor(
        learning_rate=1.0, max_iter=1, min_samples_leaf=1, early_stopping=False, on="threads:2"
    ).fit(x, y, weights)
    np.testing.assert_allclose(model.predict([[1000.0], [1001.0]]), [0, 1], atol=1e-9)


def test_staged_predictions_end_with_those_of_the_model() -> None:
    model = GradientBoostingClassifier(max_iter=4).fit(X, CLASSES)
    *_, last = model.staged_predict_proba(X)
    assert np.array_equal(last, model.predict_proba(X))
    assert len(list(model.staged_predict(X))) == 4
    assert len({each.tobytes() for each in model.staged_decision_function(X)}) == 4
    regressor = GradientBoostingRegressor(max_iter=3).fit(X, Y)
    assert np.array_equal(list(regressor.staged_predict(X))[-1], regressor.predict(X))


def test_importances_name_the_columns_that_matter() -> None:
    importances = GradientBoostingRegressor().fit(X, Y).feature_importances_
    assert importances.sum() == pytest.approx(1)
    assert importances[:3].min() > 3 * importances[3:].max()


def test_rows_in_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed here")
    from pyarrow import parquet

    columns = {f"x{number}": X[:, number] for number in range(5)}
    parquet.write_table(pyarrow.table({**columns, "label": CLASSES}), tmp_path / "rows.parquet")
    source = read(tmp_path / "rows.parquet", columns={"X": list(columns), "y": "label"})
    model = GradientBoostingClassifier(max_iter=3, on="threads:2").fit(source)
    assert trees_of(model) == trees_of(GradientBoostingClassifier(max_iter=3).fit(X, CLASSES))


class StreamedSource:
    """Rows that are never in memory, and the number of times that some were read."""

    num_rows, in_memory = len(X), False

    def __init__(self) -> None:
        self.reads = 0

    def load(self, begin: int, end: int) -> NamedArrays:
        self.reads += 1
        return NamedArrays({"X": X[begin:end], "y": Y[begin:end]})


def test_steps_do_not_read_streams_again() -> None:
    reads = []
    for max_iter in (1, 5):
        source = StreamedSource()
        model = GradientBoostingRegressor(max_iter=max_iter, on="threads:1").fit(source)
        reads.append(source.reads)
    assert reads[0] == reads[1] > 0
    assert trees_of(model) == trees_of(GradientBoostingRegressor(max_iter=5).fit(X, Y))


def test_missing_values_in_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed here")
    from pyarrow import parquet

    data, y = X[:, :2].copy(), Y.copy()
    data[::3, 0], data[1, 1] = np.nan, np.inf
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"a": data[:, 0], "b": data[:, 1], "y": y}), file)
    model = GradientBoostingRegressor(max_iter=3, on="threads:2").fit(file, "y")
    assert trees_of(model) == trees_of(GradientBoostingRegressor(max_iter=3).fit(data, y))
    parquet.write_table(pyarrow.table({"a": data[:, 0], "b": data[:, 1], "y": data[:, 0]}), file)
    with pytest.raises(Exception, match="y contains NaN or infinity"):
        model.fit(file, "y")


@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("is_first", [True, False])
def test_nulls_in_files_are_missing_values(tmp_path: Path, kind: str, is_first: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed here")
    from pyarrow import parquet

    values = (4 * X[:, 0]).astype(kind)
    is_null = np.arange(len(values)) % 3 == (0 if is_first else 1)
    data = np.where(is_null, np.nan, values.astype(np.float64))[:, None]
    file = tmp_path / "rows.parquet"
    columns = {"a": pyarrow.array(values, mask=is_null), "y": Y}
    parquet.write_table(pyarrow.table(columns), file, row_group_size=50)
    model = GradientBoostingRegressor(max_iter=3, on="threads:2")
    for rows in (file, read(file, {"X": ["a"], "y": "y"}, memory_limit=1)):
        model.fit(rows, "y" if rows is file else None)
        assert trees_of(model) == trees_of(GradientBoostingRegressor(max_iter=3).fit(data, Y))
    parquet.write_table(pyarrow.table({"a": values, "y": pyarrow.array(Y, mask=is_null)}), file)
    with pytest.raises(Exception, match=r"column 'y' in .* has .* missing values"):
        model.fit(file, "y")


@pytest.mark.parametrize(
    ("loss", "least", "message"), [("gamma", 0.0, "strictly positive y"), ("poisson", -1.0, "non-negative y")]
)
def test_targets_in_files_suit_the_loss(tmp_path: Path, loss: str, least: float, message: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed here")
    from pyarrow import parquet

    y = np.where(np.arange(400) < 300, 0.0, 2.0)
    for name, targets in {"good": y + (loss == "gamma"), "bad": np.append(y[1:], least)}.items():
        parquet.write_table(pyarrow.table({"x": X[:, 0], "y": targets}), tmp_path / name)
    model = GradientBoostingRegressor(loss, max_iter=2, on="threads:2")
    model.fit(tmp_path / "good", "y")
    with pytest.raises(Exception, match=message):
        model.fit(tmp_path / "bad", "y")


def written_unchecked(model: Any, path: Path) -> None:
    """Write the file of a damaged model: saving checks it as loading does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "find_wrong_attribute", lambda forms, attributes: None)
        model.save(path)


@pytest.mark.parametrize(
    ("name", "value"), [("left", 0), ("left", (1 << 31) - 1), ("column", 99), ("bin", -5), ("scores", 1)]
)
def test_a_file_with_other_nodes_than_trees_is_not_loaded(tmp_path: Path, name: str, value: int) -> None:
    model = GradientBoostingRegressor(max_iter=1).fit(X, Y)
    model.trees_[name][0] = value
    written_unchecked(model, tmp_path / "model")
    with pytest.raises(UsageError, match="they are not trees"):
        load(tmp_path / "model")


def test_a_file_with_other_scores_than_classes_is_not_loaded(tmp_path: Path) -> None:
    model = GradientBoostingClassifier(max_iter=1).fit(X, CLASSES)
    model.classes_ = np.arange(4)
    written_unchecked(model, tmp_path / "model")
    with pytest.raises(UsageError, match=r"baseline_ has the shape \(3,\)"):
        load(tmp_path / "model")


@pytest.mark.parametrize("name", ["roots", "categories", "value"])
def test_a_file_with_arrays_that_do_not_match_is_not_written(tmp_path: Path, name: str) -> None:
    model = GradientBoostingRegressor(max_iter=1).fit(X, Y)
    model.trees_[name] = model.trees_[name][:-1]
    with pytest.raises(UsageError, match="different numbers of"):
        model.save(tmp_path / "model")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"loss": "gamma"}, "requires strictly positive y"),
        ({"loss": "poisson"}, "requires non-negative y"),
        ({"loss": "quantile"}, "quantile must be a number"),
        ({"monotonic_cst": [1]}, "has shape"),
        ({"monotonic_cst": {1: 7}}, r"monotonic_cst\[1\] must be either -1, 0 or 1. Got 7"),
        ({"monotonic_cst": [2, 0, 0, 0, 0]}, "array-like of -1, 0 or 1"),
        ({"categorical_features": [7]}, "has 7: expected a number below 5"),
        ({"interaction_cst": [[True, False]]}, "has True: expected a number below 5"),
        ({"categorical_features": [True]}, "boolean mask must have shape"),
        ({"categorical_features": [0], "max_bins": 9}, "Categorical feature at index 0 .* <= 9"),
    ],
)
def test_wrong_arguments(params: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        GradientBoostingRegressor(on="threads:1", **params).fit(X, Y)


def test_it_has_to_be_fitted() -> None:
    with pytest.raises(NotFittedError):
        list(GradientBoostingRegressor().staged_predict(X))


def test_a_function_is_a_loss() -> None:
    rules: dict[str, Any] = {"max_iter": 5, "early_stopping": True, "random_state": 0}
    own = GradientBoostingRegressor(squared, **rules).fit(X, Y - Y.mean(), np.abs(X[:, 4]))
    other = GradientBoostingRegressor(**rules).fit(X, Y - Y.mean(), np.abs(X[:, 4]))
    np.testing.assert_allclose(own.predict(X), other.predict(X), atol=0.1)  # the first score is 0
    assert own.history_[-1]["loss"] == pytest.approx(other.history_[-1]["loss"], rel=0.05)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda y: (y, y), "returned tuple: expected"),
        (lambda y: (y, y[1:], y), r"hessians of shape \(\d+,\): expected \(\d+,\)"),
        (lambda y: (y, -np.ones(len(y)), y), "hessians below 0"),
        (lambda y: (y * np.nan, y, y), "gradients that are not finite"),
    ],
)
def test_what_a_loss_returns_is_checked(returned: Any, message: str) -> None:
    model = GradientBoostingRegressor(lambda y, scores: returned(y), on="threads:1")
    with pytest.raises(Exception, match=message):
        model.fit(X, Y)


def test_huber_bears_outliers() -> None:
    y = Y.copy()
    y[::20] += 1000
    errors = [
        np.median(np.abs(GradientBoostingRegressor(loss, max_iter=60).fit(X, y).predict(X) - Y))
        for loss in ("huber", "squared_error")
    ]
    assert errors[0] < 0.4 < 4 < errors[1]


def test_tweedie_predicts_means_of_targets_with_zeros() -> None:
    y = np.where(X[:, 3] > 0.5, 0.0, np.exp(X[:, 0]))
    model = GradientBoostingRegressor("tweedie", power=1.3, max_iter=60).fit(X, y)
    assert model.predict(X).min() > 0
    assert model.predict(X).mean() == pytest.approx(y.mean(), rel=0.05)
    assert model.score(X, y) > 0.7
    with pytest.raises(ValueError, match="requires non-negative y"):
        model.fit(X, -y)


def test_shap_values_add_up_to_the_scores() -> None:
    data = np.where(X < -1.5, np.nan, X)
    data[:, 4] = np.abs(data[:, 4].round())
    model = GradientBoostingRegressor("poisson", max_iter=20, categorical_features=[4]).fit(data, np.exp(Y))
    values = model.shap_values(data)
    assert values.shape == (400, 6)
    np.testing.assert_allclose(values.sum(axis=1), np.log(model.predict(data)), atol=1e-12)
    classifier = GradientBoostingClassifier(max_iter=5).fit(data, CLASSES)
    values = classifier.shap_values(data)
    assert values.shape == (400, 3, 6)
    np.testing.assert_allclose(values.sum(axis=2), classifier.decision_function(data), atol=1e-12)


def test_shap_values_are_those_of_the_definition() -> None:
    data = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).repeat([10, 20, 30, 40], axis=0)
    y = 2 * data[:, 0] + data[:, 0] * data[:, 1]
    model = GradientBoostingRegressor(max_iter=1, learning_rate=1.0, min_samples_leaf=1, min_hessian_leaf=0)
    model.fit(data, y)
    assert len(model.trees_["column"]) > 3  # the first split is that of column 0
    one, zero, mean = model.shap_values([[1.0, 1.0]])[0]
    rows = {given: y[(data[:, 0] == 1) if given == "0" else slice(None)].mean() for given in ("", "0")}
    with_1 = 0.3 * 0 + 0.7 * 3  # column 1 is known: the first split sends rows both ways
    assert mean == pytest.approx(rows[""])
    assert one == pytest.approx((rows["0"] - rows[""] + 3 - with_1) / 2)
    assert zero == pytest.approx((with_1 - rows[""] + 3 - rows["0"]) / 2)


def test_shap_values_of_long_paths_are_exact() -> None:
    columns = 200
    nodes = 2 * columns + 1
    widths = {"categories": (nodes, 4), "value": (nodes, 1)}
    tree = {name: np.zeros(widths.get(name, (nodes,)), kind) for name, kind in NODE_KINDS.items()}
    tree["column"][:] = tree["left"][:] = -1
    tree["column"][:-1:2], tree["left"][:-1:2] = np.arange(columns), np.arange(1, nodes, 2)
    tree["value"][-1] = 1  # if all columns are 1, and half of the rows go on at each split
    bins = Bins(np.full(columns, 0.5), np.arange(columns + 1), np.zeros(columns, np.uint8))
    values = np.zeros((2, 1, columns + 1))
    rows = np.ones((2, columns))
    rows[1, 0] = 0
    add_shap_values(joined_trees([tree], 1), bins, bins.of(rows), values)
    np.testing.assert_allclose(values[0, 0], [*[1 / columns] * columns, 0], rtol=1e-12, atol=1e-30)
    assert abs(values[1].sum()) < 1e-12
    assert values[1, 0, 0] == pytest.approx(-1 / columns, rel=1e-12)


def columns_of_paths(model: Any) -> set[frozenset[int]]:
    """Return which columns the paths from a root to a leaf have."""
    trees = model.trees_
    paths = {int(root): frozenset[int]() for root in trees["roots"][:-1]}
    found = set()
    owners = np.repeat(trees["roots"][:-1], np.diff(trees["roots"]))
    for node, column in enumerate(trees["column"].tolist()):
        if column < 0:
            found.add(paths[node])
            continue
        left = int(owners[node] + trees["left"][node])
        paths[left] = paths[left + 1] = paths[node] | {column}
    return found


@pytest.mark.parametrize(
    ("constraint", "groups"),
    [
        ([[0, 1], [3]], [{0, 1}, {3}, {2, 4}]),
        ([(0, 1), (1, 2), range(2, 5)], [{0, 1}, {1, 2}, {2, 3, 4}]),
        ("no_interactions", [{column} for column in range(5)]),
    ],
)
def test_columns_on_a_path_are_in_one_group(constraint: Any, groups: Any) -> None:
    model = GradientBoostingRegressor(max_iter=10, interaction_cst=constraint, max_features=0.8).fit(X, Y)
    paths = columns_of_paths(model)
    assert all(any(path <= group for group in groups) for path in paths)
    assert max(map(len, paths)) == max(map(len, groups))


def test_pairwise_interactions() -> None:
    model = GradientBoostingRegressor(max_iter=10, interaction_cst="pairwise").fit(X, Y)
    assert max(map(len, columns_of_paths(model))) == 2
