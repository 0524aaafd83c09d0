"""Latent Dirichlet allocation in processes: the bits are those of threads, also after a task was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from scipy.sparse import csr_array

from ronde.comqueue import IterationStep, iterate
from ronde.ml import LatentDirichletAllocation
from ronde.ml.history import Progress
from ronde.ml.topics.sampling import SamplingStep, forget_topics

X = csr_array(np.random.default_rng(0).poisson(0.2, size=(400, 80)).astype(float))


def components(on: str) -> bytes:
    model = LatentDirichletAllocation(7, doc_topic_prior="auto", random_state=0, max_iter=15, on=on)
    return model.fit(X).components_.tobytes()


@pytest.mark.parametrize(
    "tasks", [pytest.param(tasks, marks=[] if tasks == 3 else pytest.mark.slow) for tasks in (1, 2, 3, 4)]
)
def test_processes_give_the_bits_of_one_thread(tasks: int) -> None:
    assert components(f"local:{tasks}") == components("threads:1")


class KilledOnce:
    """A step of the sampler during which task 1 is killed, if a file is not there yet."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        self._step = SamplingStep("example", 7, X.shape[1], 0.1, 0.1, True, True, 20, 0, Progress("", False))

    def first_state(self) -> dict[str, Any]:
        return self._step.first_state()

    def __call__(self, c: IterationStep) -> None:
        if c.task_id == 1 and c.step_no == 14 and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._step(c)


def counts_after_loss(flag: Path, on: str) -> NDArray[Any]:
    step = KilledOnce(flag)
    result = iterate(
        step,
        data={"X": X},
        state=step.first_state(),
        max_iter=20,
        on=on,
        checkpoint_every=4,
        finish=forget_topics,
    )
    counts: NDArray[Any] = result.state.counts
    return counts


@pytest.mark.slow
def test_the_topics_of_tokens_survive_a_killed_task(tmp_path: Path) -> None:
    expected = counts_after_loss(tmp_path, "threads:2")  # no loss: the path exists
    np.testing.assert_array_equal(counts_after_loss(tmp_path / "died", "local:2"), expected)
    assert (tmp_path / "died").exists()
