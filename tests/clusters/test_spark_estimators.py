"""Estimators of `ronde.ml` on Spark: fitted where the rows of a data frame are, and as stages of Spark's pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clusters.spark_session import session_of_two_executors
from tests.conformance.fits import FITS

pytest.importorskip("ronde.spark", reason="PySpark is not installed here")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")
pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import ronde
from ronde.ml import GradientBoostingRegressor, KMeans, LinearRegression, LogisticRegression

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
    assert not hasattr(means, "labels_")
    classes = LogisticRegression(on="spark:2", tol=1e-6).fit(frame, "label")
    np.testing.assert_allclose(classes.coef_, LogisticRegression(tol=1e-6).fit(X, Y).coef_, atol=1e-6)
    for predict in (means.predict, means.transform, classes.predict_proba):
        with pytest.raises(ValueError, match=r"predict there, by ronde\.ml\.spark\.SparkModel"):
            predict(frame.select("features"))


@pytest.mark.usefixtures("session")
def test_boosting_and_topics_at_once() -> None:
    """Each fit takes both executors, so one waits for the other."""
    names = ["boosting", "topics"]
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(FITS[name], None, "spark:2") for name in names]
        assert [each.result() for each in both] == [FITS[name](None, "threads:1") for name in names]


def test_nulls_of_a_frame_are_missing_values(session: Any) -> None:
    numbers = session.range(0, len(X), 1, 3).selectExpr("if(id % 3 = 0, null, id % 7) as a", "id % 11 as y")
    model = GradientBoostingRegressor(max_iter=3, on="spark:2").fit(numbers, "y")
    rows = np.where(NUMBERS % 3 == 0, np.nan, NUMBERS % 7)[:, None]
    expected = GradientBoostingRegressor(max_iter=3).fit(rows, NUMBERS % 11)
    np.testing.assert_allclose(model.predict(rows), expected.predict(rows))


def collected(frame: Any, column: str) -> np.ndarray[Any, Any]:
    """Return the values of a column in the order of `X`."""
    rows = frame.select("id", column).orderBy("id").collect()
    return np.array(
        [row[column].toArray() if hasattr(row[column], "toArray") else row[column] for row in rows]
    )


def test_a_pipeline_predicts_on_the_executors_and_is_saved_without_pickles(
    session: Any, tmp_path: Path
) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler

    from ronde.ml.spark import SparkEstimator

    numbers = session.range(0, len(X), 1, 3).selectExpr(
        "id",
        "id % 7 as a",
        "id % 11 as b",
        "30 * (id % 3) as c",
        "cast(id % 7 > id % 11 as int) as label",
        "1 + id % 2 as weight",
    )
    assembler = VectorAssembler(inputCols=["a", "b", "c"], outputCol="features")
    stage = SparkEstimator(LogisticRegression(tol=1e-6), weightCol="weight", predictionCol="class")
    fitted = Pipeline(stages=[assembler, stage]).fit(numbers)
    fitted.write().save(f"file://{tmp_path}/pipeline")
    loaded = PipelineModel.load(f"file://{tmp_path}/pipeline")
    expected = LogisticRegression(tol=1e-6).fit(X, Y, 1 + NUMBERS % 2)
    for model in (fitted, loaded):
        predicted = model.transform(numbers)
        np.testing.assert_array_equal(collected(predicted, "class"), expected.predict(X))
        np.testing.assert_allclose(collected(predicted, "probability"), expected.predict_proba(X), atol=1e-6)
    assert BinaryClassificationEvaluator().evaluate(predicted) > 0.99
    with pytest.raises(
        ronde.UsageError, match=r"has the columns \['class', 'rawPrediction', 'probability'\] already"
    ):
        model.stages[1].transform(predicted)


def test_parameters_are_those_of_spark_ml(session: Any, tmp_path: Path) -> None:
    from pyspark.ml.functions import array_to_vector

    from ronde.ml.spark import SparkEstimator, SparkModel

    numbers = session.range(0, len(X), 1, 3).selectExpr(
        "id", "array(id % 7, id % 11, 30 * (id % 3)) as features", "3 * (id % 7) - id % 11 + 1 as label"
    )
    start = X[[0, 1, 2]]
    means = SparkEstimator(KMeans(3, init=start, on="spark:2"), predictionCol="cluster")
    means.write().save(f"file://{tmp_path}/means")
    means = SparkEstimator.load(f"file://{tmp_path}/means").setParams(max_iter=50)
    assert (means.getOrDefault("on"), means.getPredictionCol()) == ("spark:2", "cluster")
    np.testing.assert_array_equal(means.getOrDefault("init"), start)
    expected = KMeans(3, init=start).fit(X)
    clusters = means.fit(numbers).transform(numbers)
    np.testing.assert_array_equal(collected(clusters, "cluster"), expected.labels_)

    line = SparkEstimator(LinearRegression(fit_intercept=False))
    vectors = numbers.withColumn("features", array_to_vector("features"))
    model = line.fit(vectors, {line.fit_intercept: True})
    np.testing.assert_allclose(model.estimator.coef_, [3, -1, 0], atol=1e-9)
    assert line.getOrDefault(line.fit_intercept) is False
    lines = SparkModel(LinearRegression().fit(X, np.stack([NUMBERS, Y], axis=1)), predictionCol="two")
    assert collected(lines.transform(numbers), "two").shape == (len(X), 2)


def test_mistakes_in_pipelines(frame: Any) -> None:
    from ronde.ml.spark import SparkEstimator, SparkModel

    with pytest.raises(ronde.UsageError, match="got a int: expected an estimator of ronde"):
        SparkEstimator(5)  # type: ignore[arg-type]
    with pytest.raises(ronde.UsageError, match=r"SparkEstimator has no parameters \['feature_cols'\]"):
        SparkEstimator(KMeans(2), feature_cols="a")
    with pytest.raises(ronde.UsageError, match=r"lacks the columns \['clicked'\]"):
        SparkEstimator(LogisticRegression(), labelCol="clicked").fit(frame)
    model = SparkModel(KMeans(2).fit(X))
    with pytest.raises(Exception, match="X has 1 features, but KMeans is expecting 3 features"):
        model.transform(frame.selectExpr("label as features")).collect()
    with pytest.raises(Exception, match="column 'features' has missing values"):
        model.transform(frame.selectExpr("if(label = 0, null, array(1, 2, 3)) as features")).collect()
