"""Rows of files and tables in place of arrays, with the other arguments as names of columns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")

import pyarrow as pa
from pyarrow.parquet import write_table

import ronde
from ronde.comqueue import read
from ronde.ml import KMeans, LogisticRegression, MiniBatchKMeans, Ridge
from ronde.ml.row_predictions import without_feature_names

random = np.random.default_rng(0)
X = random.normal(size=(200, 2)) + 5 * random.integers(2, size=(200, 1))
Y = X @ [1, -2] + 1
WEIGHTS = random.uniform(size=200)
TABLE = pa.table({"a": X[:, 0], "b": X[:, 1], "y": Y, "clicked": (Y > 0).astype(int), "weight": WEIGHTS})


@pytest.fixture(params=["file", "table"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "table":
        return TABLE.select

    def written(columns: list[str]) -> Path:
        write_table(TABLE.select(columns), tmp_path / "rows.parquet")
        return tmp_path / "rows.parquet"

    return written


def test_columns_are_targets_and_weights(rows: Any) -> None:
    ridge = Ridge().fit(rows(["a", "y", "b", "weight"]), "y", sample_weight="weight")
    np.testing.assert_allclose(ridge.coef_, Ridge().fit(X, Y, WEIGHTS).coef_, atol=1e-12)
    classes = LogisticRegression().fit(rows(["a", "b", "clicked"]), "clicked")
    np.testing.assert_allclose(classes.coef_, LogisticRegression().fit(X, Y > 0).coef_, atol=1e-9)
    means = KMeans(2, init=X[:2]).fit(rows(["a", "b", "weight"]), sample_weight="weight")
    expected = KMeans(2, init=X[:2]).fit(X, sample_weight=WEIGHTS)
    np.testing.assert_allclose(means.cluster_centers_, expected.cluster_centers_, atol=1e-12)
    np.testing.assert_array_equal(means.labels_, expected.labels_)


def test_a_path_of_points(tmp_path: Path) -> None:
    path = str(tmp_path / "points.parquet")
    write_table(TABLE.select(["a", "b"]), path)
    model = KMeans(2, init=X[:2]).fit(path)
    assert model.cluster_centers_.tobytes() == KMeans(2, init=X[:2]).fit(X).cluster_centers_.tobytes()
    np.testing.assert_array_equal(model.predict(path), model.labels_)


def test_mistakes(rows: Any) -> None:
    with pytest.raises(ronde.UsageError, match=r"lacks the columns \['label'\]"):
        Ridge().fit(rows(["a", "y"]), "label")
    with pytest.raises(
        ValueError, match="sample_weight is of type ndarray, and the rows are those of a file"
    ):
        Ridge().fit(rows(["a", "y"]), "y", sample_weight=WEIGHTS)
    with pytest.raises(ValueError, match="X is a source of rows, and y or sample_weight is not None"):
        Ridge().fit(read(TABLE, {"X": ["a"], "y": "y"}), Y)
    with pytest.raises(ValueError, match="has rows with several parts, or on a cluster: expected an array"):
        KMeans(2).fit(X).predict(read(TABLE, {"X": ["a", "b"], "y": "y"}))


@pytest.mark.parametrize("is_encoded", [False, True])
def test_the_error_for_labels_that_are_strings_says_what_to_do(is_encoded: bool, tmp_path: Path) -> None:
    labels = pa.array(np.where(Y > 0, "yes", "no"))
    table = TABLE.append_column("label", labels.dictionary_encode() if is_encoded else labels)
    write_table(table, tmp_path / "rows.parquet")
    for rows in (table, tmp_path / "rows.parquet"):
        with pytest.raises(ronde.UsageError, match=r"column 'label' .* string.*pass them as the array y"):
            LogisticRegression().fit(rows, "label")
    assert set(LogisticRegression().fit(X, labels.to_numpy(zero_copy_only=False)).classes_) == {"yes", "no"}


def test_what_needs_rows_in_memory_says_so(rows: Any) -> None:
    data = read(rows(["a", "b"]))
    with pytest.raises(
        ValueError, match=r"partial_fit needs rows in memory, and X is <.*: read some at a time"
    ):
        MiniBatchKMeans(2).partial_fit(data)
    with pytest.raises(
        ValueError, match=r"a prediction of Ridge needs rows in memory, and X is <.*: read some"
    ):
        Ridge().fit(X, Y).predict(data)
    model = MiniBatchKMeans(2, random_state=0).partial_fit(data.load(0, 100))  # type: ignore[union-attr]
    assert model.n_steps_ == 1


def names_of(model: Any) -> list[str] | None:
    return list(model.feature_names_in_) if hasattr(model, "feature_names_in_") else None


def test_features_have_the_names_of_the_columns(rows: Any) -> None:
    frame = pa.table({"b": X[:, 1], "a": X[:, 0]})
    model = Ridge().fit(rows(["a", "y", "b", "weight"]), "y", sample_weight="weight")
    assert names_of(model) == ["a", "b"]
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.predict(frame)
    assert len(model.predict(frame.select(["a", "b"]))) == len(X)
    assert names_of(model.fit(rows(["b", "y"]), "y")) == ["b"]
    assert names_of(model.fit(read(rows(["b", "a", "y"]), {"X": None, "y": "y"}))) == ["b", "a"]
    assert names_of(model.fit(X, Y)) is None
    assert names_of(KMeans(2).fit(read(rows(["b", "a"])))) == ["b", "a"]
    assert names_of(KMeans(2).fit(read(X))) is None
    assert names_of(KMeans(2).fit(rows(["a", "b", "weight"]), sample_weight="weight")) == ["a", "b"]


def test_columns_of_lists_have_no_names() -> None:
    table = pa.table({"vector": pa.FixedSizeListArray.from_arrays(X.ravel(), 2), "y": Y})
    model = Ridge().fit(TABLE.select(["a", "b", "y"]), "y")
    assert names_of(model.fit(read(table, {"X": ["vector"], "y": "y"}))) is None
    assert model.n_features_in_ == 2


def test_files_have_names_for_a_prediction(tmp_path: Path) -> None:
    for name, columns in (("fit", ["a", "b"]), ("other", ["b", "a"])):
        write_table(TABLE.select(columns), tmp_path / f"{name}.parquet")
    model = KMeans(2, init=X[:2]).fit(tmp_path / "fit.parquet")
    assert names_of(model) == ["a", "b"]
    assert model.predict(tmp_path / "fit.parquet").tolist() == model.labels_.tolist()
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.predict(tmp_path / "other.parquet")


def test_the_index_of_a_data_frame_is_no_feature() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    frame = pandas.DataFrame({"a": X[:, 0], "text": "x", "b": X[:, 1], "y": Y}).set_index("y", drop=False)
    frame.index.name = "number"
    model = Ridge().fit(frame, "y")
    assert names_of(model) == ["a", "b"]
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.score(frame[["b", "a"]], Y)


@pytest.mark.parametrize("labels", [[0, 1], [("a", 1), ("a", 2)], [0.5, 1.5]])
def test_only_strings_are_names_of_features(labels: list[Any]) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    frame = pandas.DataFrame(X, columns=pandas.Index(labels))
    model = KMeans(2, init=X[:2]).fit(read(frame))
    assert names_of(model) is names_of(KMeans(2).fit(frame)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.predict(frame).tolist() == model.predict(read(frame)).tolist() == model.labels_.tolist()


@pytest.mark.filterwarnings("ignore:The DataFrame has column names of mixed type")  # of pandas
def test_columns_without_a_string_as_name_leave_the_others_theirs() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], 0: Y}, index=pandas.Index(Y, name="number"))
    model = Ridge().fit(read(frame, {"X": None, "y": "0"}))
    assert names_of(model) == ["a", "b"]
    assert names_of(model.fit(read(frame, {"X": ["a", "0"], "y": "b"}))) is None


@pytest.mark.parametrize("masked", ["X", "y", "sample_weight"])
def test_masked_arrays_are_refused(masked: str) -> None:
    given: dict[str, Any] = {"X": X, "y": Y, "sample_weight": WEIGHTS}
    given[masked] = np.ma.masked_less(given[masked], 0.5)
    with pytest.raises(ronde.UsageError, match=rf"^{masked} is a masked array.*: pass x.filled\(value\)"):
        Ridge().fit(**given)
    if masked == "X":
        for model in (Ridge().fit(X, Y), KMeans(2).fit(X)):
            with pytest.raises(ronde.UsageError, match="X is a masked array"):
                model.predict(given["X"])
        with pytest.raises(ronde.UsageError, match="X is a masked array"):
            KMeans(2).fit(given["X"])


def test_a_matrix_needs_no_names_on_a_cluster() -> None:
    model = Ridge().fit(TABLE.select(["a", "b", "y"]), "y")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(
            without_feature_names(model).predict(X), X @ model.coef_ + model.intercept_
        )
    assert names_of(model) == ["a", "b"]
