"""K-means and boosting in 1, 2, 3 and 4 processes: the number of tasks changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.ml import GradientBoostingClassifier, KMeans

POINTS = np.random.default_rng(0).normal(size=(200, 3)) * 10.0 ** np.arange(-6, 9, 6)


def fit(on: str) -> tuple[bytes, bytes, float, int]:
    model = KMeans(4, random_state=0, max_iter=10, tol=0, on=on).fit(POINTS)
    return model.cluster_centers_.tobytes(), model.labels_.tobytes(), model.inertia_, model.n_iter_


@pytest.mark.parametrize(
    "tasks", [pytest.param(tasks, marks=[] if tasks == 4 else pytest.mark.slow) for tasks in (1, 2, 3, 4)]
)
def test_processes_give_the_bits_of_one_thread(tasks: int) -> None:
    assert fit(f"local:{tasks}") == fit("threads:1")


def boosted(on: str) -> list[bytes]:
    model = GradientBoostingClassifier(max_iter=3, subsample=0.7, random_state=0, on=on)
    model.fit(POINTS, np.arange(len(POINTS)) % 3, POINTS[:, 0] ** 2)
    return [array.tobytes() for array in model.trees_.values()]


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 2, 3, 4])
def test_processes_boost_the_trees_of_one_thread(tasks: int) -> None:
    assert boosted(f"local:{tasks}") == boosted("threads:1")
