"""Optimizers in processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ronde.ml.losses import LogisticLoss
from ronde.ml.optimizers import OWLQN, LinearObjective

Array = NDArray[Any]

L1, L2 = 1e-3, 1e-4

pytestmark = pytest.mark.slow
COLUMNS = 120  # enough for BLAS to use several threads for the products of a block


def rows() -> dict[str, Array]:
    random = np.random.default_rng(0)
    X = random.normal(size=(20_000, COLUMNS))
    return {"X": X, "y": np.where(X[:, :9].sum(axis=1) + random.normal(size=len(X)) > 0, 1.0, -1.0)}


class KilledOnce(LinearObjective):
    """Kills its process when w has come some way, unless the file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(LogisticLoss(), l1=L1, l2=L2)
        self._path = path

    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        if np.abs(w).max() > 0.5 and not self._path.exists():
            self._path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_and_gradient(block, w)


def test_processes_give_the_bits_of_threads_also_after_a_death(tmp_path: Path) -> None:
    start, objective = np.zeros(COLUMNS + 1), LinearObjective(LogisticLoss(), l1=L1, l2=L2)
    expected = OWLQN(12).minimize(objective, rows(), start, on="threads:1")
    for tasks in (1, 3):
        found = OWLQN(12).minimize(objective, rows(), start, on=f"local:{tasks}")
        assert (found.w == expected.w).all()
        assert found.history == expected.history
    killed = KilledOnce(tmp_path / "killed")
    found = OWLQN(12).minimize(killed, rows(), start, on="local:2", checkpoint_every=2)
    assert (tmp_path / "killed").exists()
    assert (found.w == expected.w).all()
    assert found.history == expected.history
