"""Estimators of `ronde.ml` that are fitted to a Spark data frame, where its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.clusters.spark_session import session_of_two_executors

pytest.importorskip("ronde.spark", reason="PySpark is not installed here")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")
pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.ml import KMeans, LogisticRegression

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NUMBERS = np.arange(3000.0)
X = np.stack([NUMBERS % 7, NUMBERS % 11, 30 * (NUMBERS % 3)], axis=1)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)


@pytest.fixture(scope="module")
def frame(session: Any) -> Any:
    """Rows of a vector and a label."""
    from pyspark.ml.feature import VectorAssembler

    columns = ["id % 7 as a", "id % 11 as b", "30 * (id % 3) as c", "cast(id % 7 > id % 11 as int) as label"]
    numbers = session.range(0, len(X), 1, 3).selectExpr(*columns)
    vectors = VectorAssembler(inputCols=["a", "b", "c"], outputCol="features").transform(numbers)
    return vectors.select("features", "label").cache()


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with session_of_two_executors() as session:
        yield session


def test_estimators_take_the_frame(frame: Any) -> None:
    start = X[[0, 1, 2]]
    means = KMeans(3, init=start, on="spark:2").fit(frame.select("features"))
    expected = KMeans(3, init=start).fit(X)
    np.testing.assert_allclose(means.cluster_centers_, expected.cluster_centers_, atol=1e-9)
    assert len(means.labels_) == len(X)
    classes = LogisticRegression(on="spark:2", tol=1e-6).fit(frame, "label")
    np.testing.assert_allclose(classes.coef_, LogisticRegression(tol=1e-6).fit(X, Y).coef_, atol=1e-6)
    with pytest.raises(ValueError, match="has rows with several parts, or on a cluster: expected an array"):
        means.predict(frame.select("features"))
