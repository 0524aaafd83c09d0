"""Forests in 1, 2 and 3 processes, and after a killed one: the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.comqueue import IterationStep
from ronde.ml import ExtraTreesRegressor, RandomForestClassifier
from ronde.ml.trees import forest_estimator
from ronde.ml.trees.forests import ForestStep

ROWS = np.random.default_rng(0).normal(size=(200, 4))
WEIGHTS = np.abs(ROWS[:, 3])


def forests(on: str) -> list[bytes]:
    rules: dict[str, Any] = {
        "n_estimators": 8,
        "bootstrap": True,
        "oob_score": True,
        "random_state": 0,
        "on": on,
    }
    classes = RandomForestClassifier(**rules).fit(ROWS, (ROWS[:, 0] > 0) * 1 + (ROWS[:, 1] > 1))
    numbers = ExtraTreesRegressor(**rules).fit(ROWS, ROWS[:, 0] * ROWS[:, 1], WEIGHTS)
    arrays = [*classes.trees_.values(), *numbers.trees_.values()]
    return [array.tobytes() for array in (*arrays, classes.oob_decision_function_, numbers.oob_prediction_)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some inputs do not have OOB scores")
@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_processes_grow_the_trees_of_one_thread(tasks: int) -> None:
    assert forests(f"local:{tasks}") == forests("threads:1")


class KilledOnce(ForestStep):
    """A step during which task 1 is killed in step 3, if a file is not there yet."""

    flag: Path

    def __call__(self, c: IterationStep) -> None:
        if c.task_id == 1 and c.step_no == 3 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__call__(c)

    def __reduce__(self) -> tuple[Any, ...]:
        return _killed_once, (self._rules, self._report, self.flag)

    def __deepcopy__(self, memo: object) -> KilledOnce:
        return _killed_once(self._rules, self._report, self.flag)


def _killed_once(rules: Any, report: Any, flag: Path) -> KilledOnce:
    step = KilledOnce(rules, report)
    step.flag = flag
    return step


@pytest.mark.slow
def test_a_forest_continues_after_a_killed_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trees(flag: Path, on: str) -> list[bytes]:
        monkeypatch.setattr(
            forest_estimator, "ForestStep", lambda rules, report: _killed_once(rules, report, flag)
        )
        model = RandomForestClassifier(8, random_state=0, on=on).fit(ROWS, ROWS[:, 0] > 0)
        return [array.tobytes() for array in model.trees_.values()]

    (tmp_path / "no").touch()
    assert trees(tmp_path / "died", "local:2") == trees(tmp_path / "no", "threads:1")
    assert (tmp_path / "died").exists()
