from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from threadpoolctl import threadpool_info

from ronde.ml.history import History, Progress
from ronde.ml.tasks import one_blas_thread, place_of


def blas_threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_overlapping_limits_of_blas_end_with_the_last() -> None:
    before = blas_threads()
    first, second = one_blas_thread(), one_blas_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas_threads() == {1}
    second.__exit__(None, None, None)
    assert blas_threads() == before


def test_a_short_fit_is_one_task() -> None:
    assert place_of(None, 100) == "threads:1"
    assert place_of("local:3", 100) == "local:3"


def test_a_copy_in_another_process_reports_without_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("KMeans", True, context=object(), estimator=object())
    assert copy.deepcopy(progress) is progress
    assert pickle.loads(pickle.dumps(progress))({"step": 1, "loss": np.float32(0.25)}) is False
    assert capsys.readouterr().err == "KMeans: step 1, loss 0.25\n"


def test_a_history_is_a_sequence_of_plain_records() -> None:
    history = History([{"step": np.int64(1), "loss": np.float64(2)}, {"step": 2, "loss": 1.5}])
    assert len(history) == 2
    assert type(history[0]["loss"]) is float
    assert repr(history) == "<History: 2 steps; the last: step 2, loss 1.5>"
    assert repr(History()) == "<History: 0 steps>"


def test_a_plot_of_a_history() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="Matplotlib is not installed here")
    matplotlib.use("agg")
    ax = History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]).plot()
    (line,) = ax.lines
    assert line.get_xydata().tolist() == [[1, 2], [2, 1.5]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")


def test_ronde_does_not_import_scikit_learn() -> None:
    program = (
        "import sys, ronde, ronde.comqueue, ronde.ml; assert not {'sklearn', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
