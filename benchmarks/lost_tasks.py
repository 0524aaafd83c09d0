"""What `iterate.py --cases lost` measures: how much longer an iteration takes if a task is killed."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ronde.comqueue import IterationStep, iterate
from ronde.launch.clusters.local import LocalCluster

STEPS, STEP_S, EVERY = 20, 0.05, 5
LARGE = 500_000  # float64 in the state


def compare(rounds: int) -> dict[str, float]:
    """Print two tables, and return the median times in seconds."""
    cases: dict[str, Callable[[], float]] = {}
    places: dict[str, Callable[[], Any]] = {
        "processes": lambda: "local:2",
        "a cluster": lambda: LocalCluster(2),
    }
    for name, place in places.items():
        cases[f"{name}, no checkpoints"] = partial(_time, place, None)
        cases[f"{name}, checkpoints"] = partial(_time, place, EVERY)
        cases[f"{name}, killed in step 7"] = partial(_time_with_loss, place)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in cases.items():
            times[name].append(measure())
    medians = {name: statistics.median(took) for name, took in times.items()}
    print(f"\n{STEPS} steps of {STEP_S * 1e3:.0f} ms, 2 tasks, a checkpoint every {EVERY} steps")
    for name, median in medians.items():
        print(f"{name:32}{median:8.2f} s", flush=True)
    print(f"\na step with a checkpoint of {LARGE} float64 on each of 2 tasks")
    for name, place in places.items():
        with_ms, without_ms = (_step_ms(place, every) for every in (1, None))
        print(f"{name:32}{with_ms:8.1f} ms, without {without_ms:.1f} ms", flush=True)
    return medians


def _time_with_loss(place: Callable[[], Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _time(place, EVERY, Path(folder) / "killed")


def _time(place: Callable[[], Any], every: int | None, flag: Path | None = None) -> float:
    """Return the time of a run. `flag`: made by the task that dies, so that it does so once; None: no task dies."""

    def step(c: IterationStep) -> None:
        time.sleep(STEP_S)
        if flag is not None and (c.step_no, c.task_id) == (7, 1) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        c.state.total += c.sum_blocks(np.sum)

    began_s = time.perf_counter()
    iterate(
        step, data=np.ones(1000), state={"total": 0.0}, max_iter=STEPS, on=place(), checkpoint_every=every
    )
    return time.perf_counter() - began_s


def _step_ms(place: Callable[[], Any], every: int | None) -> float:
    """Return the mean time of a step with a large state."""

    def step(c: IterationStep) -> None:
        c.state._times_s.append(time.perf_counter())
        c.state.x += 1.0

    state = {"x": np.zeros(LARGE), "_times_s": []}
    times_s = iterate(
        step, data=[1, 2], state=state, max_iter=STEPS, on=place(), checkpoint_every=every
    ).state._times_s
    return float((times_s[-1] - times_s[0]) / (STEPS - 1) * 1e3)
