"""Fits to rows that lie at the tasks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde import UsageError
from ronde.comqueue import TaskGroup, read
from ronde.launch.clusters.local import LocalCluster
from ronde.ml import KMeans, MiniBatchKMeans

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(300, 3)) + 4 * RANDOM.integers(3, size=(300, 1))
FIRST_ROWS = 100  # at task 0


class RowsAtTasks:
    """A part of the rows at each of two tasks."""

    def place(self, cluster: Any) -> None:
        """Do nothing: each task has all rows, and opens some."""

    def opener(self) -> Callable[[TaskGroup], Any]:
        return rows_here


def rows_here(group: TaskGroup) -> Any:
    return read(X[FIRST_ROWS:] if group.task_id else X[:FIRST_ROWS])


@pytest.mark.slow
def test_a_fit_is_that_of_the_rows_here() -> None:
    found, expected = KMeans(3, init=X[:3], on=LocalCluster(2)), KMeans(3, init=X[:3])
    found.fit(RowsAtTasks())
    expected.fit(X)
    np.testing.assert_allclose(found.cluster_centers_, expected.cluster_centers_, atol=1e-9)
    assert found.inertia_ == pytest.approx(expected.inertia_)
    with pytest.raises(
        AttributeError, match=r"this KMeans has no labels_: fits keep none of rows on a cluster"
    ):
        print(found.labels_)
    with pytest.raises(ValueError, match="fit_predict of KMeans needs rows in memory"):
        found.fit_predict(RowsAtTasks())


def test_labels_of_an_earlier_fit_do_not_stay() -> None:
    model = MiniBatchKMeans(3, init=X[:3], on=LocalCluster(2)).fit(X)
    assert len(model.labels_) == len(X)
    assert not hasattr(model.fit(RowsAtTasks()), "labels_")


def test_rows_on_a_cluster_need_its_tasks() -> None:
    model = KMeans(3, init=X[:3])
    with pytest.raises(
        UsageError, match="the rows of 'data' are on a cluster: run the tasks there, for example by"
    ):
        model.fit(RowsAtTasks())
    with pytest.raises(ValueError, match="has rows with several parts, or on a cluster: expected an array"):
        model.fit(X).predict(RowsAtTasks())
