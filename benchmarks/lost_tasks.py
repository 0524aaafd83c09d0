"""What `iterate.py --cases lost` measures: how much longer an iteration takes if a task is killed."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ronde.comqueue import IterationStep, iterate

STEPS, STEP_S, EVERY = 20, 0.05, 5


def compare(rounds: int) -> dict[str, float]:
    """Print a table, and return the median times in seconds."""
    cases: dict[str, Callable[[], float]] = {
        "no checkpoints": lambda: _time(None, None),
        "checkpoints": lambda: _time(EVERY, None),
        "killed in step 7": _time_with_loss,
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            times[name].append(measure())
    medians = {name: statistics.median(took) for name, took in times.items()}
    print(f"\n{STEPS} steps of {STEP_S * 1e3:.0f} ms, 2 processes, a checkpoint every {EVERY} steps")
    for name, median in medians.items():
        print(f"{name:20}{median:8.2f} s", flush=True)
    return medians


def _time_with_loss() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _time(EVERY, Path(folder) / "killed")


def _time(every: int | None, flag: Path | None) -> float:
    """Return the time of a run. `flag`: made by the task that dies, so that it does so once; None: no task dies."""

    def step(c: IterationStep) -> None:
        time.sleep(STEP_S)
        if flag is not None and (c.step_no, c.task_id) == (7, 1) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        c.state.total += c.sum_blocks(np.sum)

    began_s = time.perf_counter()
    iterate(
        step, data=np.ones(1000), state={"total": 0.0}, max_iter=STEPS, on="local:2", checkpoint_every=every
    )
    return time.perf_counter() - began_s
