"""Linear models in several tasks: the same bits for any number of tasks, in threads and in processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from scipy.sparse import random_array

import ronde.ml

RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(501, 6)) + 1
Y = X @ [1, 0, -2, 0, 3, 0] + RANDOM.normal(size=501)
SPARSE = random_array((501, 30), density=0.2, format="csr", rng=1)
THREE = np.digitize(Y, np.quantile(Y, [0.3, 0.7]))
WEIGHTS = RANDOM.uniform(size=501)

MODELS = [
    pytest.param(ronde.ml.LogisticRegression(max_iter=5), THREE, id="LogisticRegression"),
    pytest.param(ronde.ml.Ridge(), Y, id="Ridge"),
    *(
        pytest.param(model, y, id=type(model).__name__, marks=pytest.mark.slow)
        for model, y in (
            (ronde.ml.Lasso(alpha=0.1), Y),
            (ronde.ml.LinearSVC(max_iter=10), THREE),
            (ronde.ml.Perceptron(max_iter=10), THREE),
        )
    ),
]


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the few rows here into blocks as many rows would be."""
    monkeypatch.setattr("ronde.ml.training_data.NUMBERS_OF_BLOCK", 50)


def bits(model: Any, rows: Any, y: Any, on: str) -> bytes:
    model.set_params(on=on).fit(rows, y, sample_weight=WEIGHTS)
    return bytes(model.coef_.tobytes() + np.asarray(model.intercept_).tobytes())


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("model", "y"), MODELS)
@pytest.mark.parametrize(
    "rows", [pytest.param(X, id="dense"), pytest.param(SPARSE, id="sparse", marks=pytest.mark.slow)]
)
def test_threads_give_the_same_bits(model: Any, y: Any, rows: Any) -> None:
    assert len({bits(model, rows, y, f"threads:{tasks}") for tasks in (1, 2, 3, 4)}) == 1


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.slow
def test_processes_give_the_bits_of_threads() -> None:
    model = ronde.ml.LogisticRegression(max_iter=5, verbose=1)
    assert bits(model, X, THREE, "local:3") == bits(model, X, THREE, "threads:1")
