"""Rows of files and tables in place of arrays, with the other arguments as names of columns."""

from __future__ import annotations

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
