"""Estimators of `ronde.ml` on Flink: fitted where the rows of a table are, and with predictions made there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clusters.flink_cluster import PATIENCE_S, Flink, flink_cluster, table_environment
from tests.conformance.cluster_kinds import SLOTS, agents, parent_of

pytest.importorskip("pyflink", reason="PyFlink is not installed here")
pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import ronde
from ronde.ml import KMeans, LogisticRegression

pytestmark = [pytest.mark.flink, pytest.mark.slow]

# All are integers, whose sums are exact in any order.
NUMBERS = np.arange(3000)
X = np.stack([NUMBERS % 7, NUMBERS % 11], axis=1).astype(np.float64)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)
START = X[[0, 1, 2]]
SOURCE = (
    "CREATE TABLE numbers (n BIGINT) WITH ('connector' = 'datagen', 'fields.n.kind' = 'sequence', "
    f"'fields.n.start' = '0', 'fields.n.end' = '{len(NUMBERS) - 1}')"
)
QUERY = (
    "SELECT n, MOD(n, 7) AS a, CAST(MOD(n, 11) AS DOUBLE) AS b, IF(MOD(n, 7) > MOD(n, 11), 1, 0) AS label "
    "FROM numbers"
)


@pytest.fixture(scope="module")
def flink() -> Iterator[Flink]:
    with flink_cluster() as flink:
        yield flink


@pytest.fixture(scope="module")
def table(flink: Flink) -> Any:
    """A table of four columns: its rows' number n, the features a and b, and a label."""
    import pyflink

    # As users of Python functions set it, unless the cluster has this file anyway.
    (jar,) = Path(pyflink.__path__[0]).glob("opt/flink-python*.jar")
    tables = table_environment(flink, pipeline__jars=jar.as_uri())
    tables.execute_sql(SOURCE)
    return tables.sql_query(QUERY)


@pytest.fixture
def cluster(flink: Flink) -> Any:
    from ronde.flink import FlinkCluster

    return FlinkCluster(flink.settings)


def wait_until_agents_have_ended() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while agents():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def columns(table: Any, *names: str) -> Any:
    from pyflink.table.expressions import col

    return table.select(*map(col, names))


def test_kmeans_of_a_table_gives_the_same_bits_as_here_and_two_fits_at_once_do_too(table: Any) -> None:
    """One fit takes both slots, so each job of the other one waits for them."""
    points, found = columns(table, "a", "b"), {}

    def fit(tasks: int) -> None:
        found[tasks] = KMeans(3, init=START, on=f"flink:{tasks}").fit(points)

    threads = [threading.Thread(target=fit, args=(tasks,)) for tasks in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = KMeans(3, init=START).fit(X)
    for tasks in (1, 2):
        assert found[tasks].cluster_centers_.tobytes() == expected.cluster_centers_.tobytes()
        assert (found[tasks].inertia_, found[tasks].n_iter_) == (expected.inertia_, expected.n_iter_)
        assert not hasattr(found[tasks], "labels_")


def test_a_lost_task_ends_a_fit(table: Any) -> None:
    """The victim is Flink's Python worker, above one of two agents that run for long enough to have begun."""

    def kill() -> None:
        found: list[int] = []
        deadline, since = time.monotonic() + PATIENCE_S, time.monotonic()
        while len(found) < SLOTS or time.monotonic() < since + 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            if (now := sorted(agents())) != found:
                found, since = now, time.monotonic()
        os.kill(parent_of(found[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(ronde.WorkerError) as caught:
            KMeans(3, init="random", n_init=10**6, on="flink:2").fit(columns(table, "a", "b"))  # without end
    finally:
        thread.join()
    assert caught.value.has_lost_task
    assert "A task was lost, and the run has saved no checkpoints" in caught.value.__notes__[0]
    wait_until_agents_have_ended()


def test_a_classifier_of_arrays_gives_the_same_bits_as_here(cluster: Any) -> None:
    model, here = (LogisticRegression(tol=1e-6, on=on).fit(X, Y) for on in (cluster, "threads:3"))
    assert model.coef_.tobytes() == here.coef_.tobytes()
    assert model.n_iter_ == here.n_iter_


def test_a_classifier_of_a_table(table: Any) -> None:
    model = LogisticRegression(tol=1e-6, on="flink:2").fit(columns(table, "a", "b", "label"), "label")
    expected = LogisticRegression(tol=1e-6).fit(X, Y)
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-6)
    assert model.classes_.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"predict there, by ronde\.ml\.flink\.with_predictions"):
        model.predict(table)


def test_the_cluster_predicts(table: Any) -> None:
    from ronde.ml.flink import with_predictions

    classes, means = LogisticRegression(tol=1e-6).fit(X, Y), KMeans(3, init=START).fit(X)
    outputs = {"class": "predict", "probability": "predict_proba"}
    predicted = with_predictions(table, classes, ["a", "b"], outputs)
    predicted = with_predictions(predicted, means, ["a", "b"], {"cluster": "predict"})
    names = predicted.get_resolved_schema().get_column_names()
    assert list(names) == ["n", "a", "b", "label", "class", "probability", "cluster"]
    with predicted.execute().collect() as rows:
        n, _, _, _, labels, probabilities, clusters = zip(*sorted(map(tuple, rows)))
    assert list(n) == NUMBERS.tolist()
    np.testing.assert_array_equal(labels, classes.predict(X))
    np.testing.assert_allclose(probabilities, classes.predict_proba(X), rtol=1e-12)
    np.testing.assert_array_equal(clusters, means.labels_)


def test_mistakes_in_predictions(table: Any) -> None:
    from ronde.ml.flink import with_predictions

    model = KMeans(3, init=START).fit(X)
    with pytest.raises(
        ronde.UsageError,
        match=r"the columns \['n', 'a', 'b', 'label'\] are 4 features, but KMeans is expecting 2: name them",
    ):
        with_predictions(table, model)
    with pytest.raises(ronde.UsageError, match=r"the table lacks the columns \['c'\]: it has \['n', 'a'"):
        with_predictions(table, model, ["a", "c"])
    with pytest.raises(ronde.UsageError, match=r"has the columns \['label'\] already: drop them"):
        with_predictions(table, model, ["a", "b"], {"label": "predict"})
    with pytest.raises(ronde.UsageError, match="KMeans has no predict_proba"):
        with_predictions(table, model, ["a", "b"], {"probability": "predict_proba"})
    with pytest.raises(ronde.UsageError, match="the model is a int: expected an estimator of ronde"):
        with_predictions(table, 5)  # type: ignore[arg-type]
    text = table._t_env.sql_query("SELECT CAST(n AS STRING) AS a, n AS b FROM numbers")
    with pytest.raises(ronde.UsageError, match=r"column 'a' has the type .*: expected numbers"):
        with_predictions(text, model)
