"""K-means and boosting in 1, 2, 3 and 4 processes: the number of tasks changes no bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.comqueue import iterate
from ronde.ml import GradientBoostingClassifier, KMeans
from ronde.ml.trees.boosting import BoostingRules, BoostingStep, first_state
from ronde.ml.trees.growing import TreeRules
from ronde.ml.trees.losses import LOGISTIC
from ronde.ml.trees.trees import joined_trees

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


class KillsOnce:
    """Gets the records of a fit, and kills the process of task 0 in step 12, unless the flag exists."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __call__(self, record: Any, state: Any) -> bool:
        if record["step"] == 12 and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return False


@pytest.mark.slow
def test_boosting_goes_on_after_the_loss_of_a_task(tmp_path: Path) -> None:
    def trees(flag: Path, on: str) -> list[bytes]:
        no_column = np.zeros(POINTS.shape[1], np.uint8)
        rules = BoostingRules(
            LOGISTIC, TreeRules(), 0.1, 255, no_column, 0.2, patience=0, tol=0, row_fraction=0.8, seed=1
        )
        data = {"X": POINTS, "y": np.arange(len(POINTS)) % 2.0}
        step = BoostingStep(rules, KillsOnce(flag))
        result = iterate(step, data=data, state=first_state(), max_iter=20, on=on, checkpoint_every=5)
        state = result.state
        return [
            np.array([state.losses, state.held_losses]).tobytes(),
            joined_trees(state.trees, 1)["value"].tobytes(),
        ]

    (tmp_path / "no").touch()
    assert trees(tmp_path / "died", "local:2") == trees(tmp_path / "no", "threads:1")
    assert (tmp_path / "died").exists()
