"""Fits of Word2Vec and latent Dirichlet allocation continue with the same bits after a task was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.comqueue import IterationStep
from ronde.ml import LatentDirichletAllocation, Word2Vec
from ronde.ml.topics import latent_dirichlet_allocation
from ronde.ml.words import word2vec

RANDOM = np.random.default_rng(0)
COUNTS = RANDOM.poisson(0.3, size=(200, 40)).astype(float)
SENTENCES = [[f"w{word}" for word in row] for row in RANDOM.integers(0, 30, (2000, 8))]


class KilledOnce:
    """A step during which task 1 is killed, if a file is not there yet."""

    def __init__(self, step: Any, flag: Path, step_no: int) -> None:
        self._step, self._flag, self._step_no = step, flag, step_no

    def __call__(self, c: IterationStep) -> None:
        if c.task_id == 1 and c.step_no == self._step_no and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._step(c)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["words", "sampling", "online"])
def test_a_fit_continues_after_a_killed_task(
    estimator: Literal["words", "sampling", "online"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fitted(flag: Path, on: str) -> bytes:
        if estimator == "words":
            place(word2vec, flag, 60)
            model = Word2Vec(16, epochs=5, random_state=0, on=on).fit(SENTENCES)
            return model.vectors_.tobytes() + repr(model.history_).encode()
        place(latent_dirichlet_allocation, flag, 14)
        topics = LatentDirichletAllocation(
            5, learning_method=estimator, batch_size=20, max_iter=20, random_state=0, on=on
        ).fit(COUNTS)
        return topics.components_.tobytes() + repr(topics.history_).encode()

    def place(module: Any, flag: Path, step_no: int) -> None:
        single = SINGLE_THREADED[module]
        monkeypatch.setattr(
            module, "SingleThreadedStep", lambda step: KilledOnce(single(step), flag, step_no)
        )

    (tmp_path / "no").touch()
    assert fitted(tmp_path / "died", "local:2") == fitted(tmp_path / "no", "threads:1")
    assert (tmp_path / "died").exists()


SINGLE_THREADED = {module: module.SingleThreadedStep for module in (word2vec, latent_dirichlet_allocation)}
