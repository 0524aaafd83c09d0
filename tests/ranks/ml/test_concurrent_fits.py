"""Several fits at once, and fits that Ctrl-C ends, as in a notebook."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from threadpoolctl import threadpool_info

from ronde.launch.clusters.local import LocalCluster
from ronde.ml import GradientBoostingClassifier, KMeans, LatentDirichletAllocation, LogisticRegression

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(600, 4))
Y = (X @ [1, -1, 2, 0] + RANDOM.normal(size=600) > 0).astype(int)


def centers(on: Any) -> bytes:
    return bytes(KMeans(3, random_state=0, on=on).fit(X).cluster_centers_.tobytes())


def coefficients(on: Any) -> bytes:
    return bytes(LogisticRegression(on=on).fit(X, Y).coef_.tobytes())


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("threads:2", id="threads"),
        pytest.param(LocalCluster(2), id="one cluster", marks=pytest.mark.slow),
    ],
)
def test_two_fits_at_once_are_those_of_two_in_turn(place: Any) -> None:
    threads_before = [(each["filepath"], each["num_threads"]) for each in threadpool_info()]
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(centers, place), threads.submit(coefficients, place)]
        assert [each.result() for each in both] == [centers("threads:1"), coefficients("threads:1")]
    after = {each["filepath"]: each["num_threads"] for each in threadpool_info()}
    assert [(path, after[path]) for path, _ in threads_before] == threads_before


def trees(on: Any) -> bytes:
    model = GradientBoostingClassifier(max_iter=5, on=on).fit(X, Y)
    return b"".join(array.tobytes() for array in model.trees_.values())


def topics(on: Any) -> bytes:
    model = LatentDirichletAllocation(3, max_iter=5, random_state=0, on=on).fit(np.abs(X).round())
    return bytes(model.components_.tobytes())


@pytest.mark.slow
def test_boosting_and_topics_at_once_in_processes() -> None:
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(fit, "local:2") for fit in (trees, topics)]
        assert [each.result() for each in both] == [trees("threads:1"), topics("threads:1")]


class InterruptingRows:
    """Rows of which the fifth reading of the first block presses Ctrl-C in the process of the fit."""

    in_memory = False

    def __init__(self) -> None:
        self.num_rows, self._readings, self._driver = len(X), 0, os.getpid()

    def load(self, begin: int, end: int) -> Any:
        if begin == 0 and end > 1:  # by one of the tasks
            self._readings += 1
            if self._readings == 5:
                os.kill(self._driver, signal.SIGINT)
        return X[begin:end]


@pytest.mark.parametrize("on", ["threads:2", pytest.param("local:2", marks=pytest.mark.slow)])
def test_a_fit_ended_by_an_interrupt_leaves_nothing(on: str) -> None:
    expected = centers("threads:1")
    model = KMeans(3, init=X[:3], tol=0, max_iter=10**6, on=on)
    with pytest.raises(KeyboardInterrupt):
        model.fit(InterruptingRows())
    assert not hasattr(model, "cluster_centers_")
    for thread in threading.enumerate():
        if thread.name.startswith("ronde-task-"):
            thread.join(60)
            assert not thread.is_alive()
    assert multiprocessing.active_children() == []
    assert centers("threads:2") == expected
