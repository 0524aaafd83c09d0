"""What `iterate.py --cases weak` measures: an iteration with equally many rows for each task, in 1 to 4 tasks.

Ideally only the time grows, once there are more tasks than cores. BLAS has one thread in each task.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep, iterate
from ronde.comqueue.task_group import RankGroup

ROWS_OF_A_TASK, COLUMNS, CENTERS, STEPS = 200_000, 20, 16, 20
TASKS = (1, 2, 3, 4)
CARRIERS = ("allreduce", "allgather", "alltoall")  # the methods of a group that take an array


class Scaling(NamedTuple):
    """The measurements of one number of tasks: of the slowest task, or of the task that has most.

    `step_ms`, `cpu_ms`: time and CPU time of a step. `memory_mb`: memory that the task does not share with others, and
    its share of the rest. `bytes_sent`: what it gives to the communication of a step.
    """

    tasks: int
    step_ms: float
    cpu_ms: float
    memory_mb: float
    bytes_sent: float


def compare_tasks() -> list[Scaling]:
    """Print a table, and return its lines."""
    print(f"\nk-means, {ROWS_OF_A_TASK} x {COLUMNS} for each task, {CENTERS} centers, processes")
    print(f"{'tasks':>5}{'step ms':>10}{'CPU ms':>10}{'memory MB':>12}{'bytes sent':>12}")
    os.environ["OMP_NUM_THREADS"] = "1"
    lines = []
    for tasks in TASKS:
        line = measure_tasks(tasks)
        numbers = f"{line.step_ms:10.1f}{line.cpu_ms:10.1f}{line.memory_mb:12.1f}{line.bytes_sent:12.0f}"
        print(f"{tasks:5}{numbers}", flush=True)
        lines.append(line)
    return lines


def measure_tasks(tasks: int) -> Scaling:
    """Return the measurements of an iteration in this many processes."""
    rows = np.random.default_rng(0).normal(size=(tasks * ROWS_OF_A_TASK, COLUMNS))
    state = {"centers": rows[:CENTERS]}
    result = iterate(step, data=rows, state=state, max_iter=STEPS, on=f"local:{tasks}", finish=measured)
    return Scaling(tasks, *map(max, zip(*result.outputs)))


def step(c: IterationStep) -> None:
    """Take a step of k-means, and note its times in this process."""
    if c.step_no == 1:
        count_bytes()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    sums = c.sum_blocks(lambda rows: sums_of_members(rows, c.state.centers))
    c.state.centers = sums[:, :-1] / sums[:, -1:]
    times.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))


def sums_of_members(rows: NDArray[Any], centers: NDArray[Any]) -> NDArray[Any]:
    """Return the sum and the number of the rows that are nearest to each center."""
    nearest = ((centers**2).sum(axis=1) - 2 * rows @ centers.T).argmin(axis=1)
    members = np.eye(len(centers))[nearest]
    sums: NDArray[Any] = members.T @ np.c_[rows, np.ones(len(rows))]
    return sums


times: list[tuple[float, float]] = []  # of the steps of this process
sent: list[int] = []  # the bytes of each call that communicates


def count_bytes() -> None:
    """Note the bytes of the arrays that this process gives to its group."""
    for name in CARRIERS:
        setattr(RankGroup, name, _counted(getattr(RankGroup, name)))


def _counted(carry: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: RankGroup, array: NDArray[Any], *arguments: Any) -> Any:
        if group.num_tasks > 1:
            sent.append(array.nbytes)
        return carry(group, array, *arguments)

    return call


def measured(c: IterationStep) -> tuple[float, float, float, float]:
    """Return step_ms, cpu_ms, memory_mb and bytes_sent of this task."""
    wall_s, cpu_s = (statistics.median(column) for column in zip(*times))
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    (memory_kb,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return wall_s * 1e3, cpu_s * 1e3, memory_kb * 1024 / 1e6, sum(sent) / STEPS


def plot_scaling(path: Path, lines: list[Scaling]) -> None:
    """Write a picture: the measurements over the number of tasks."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    tasks = [line.tasks for line in lines]
    axes[0].plot(tasks, [line.step_ms for line in lines], marker="o", label="time")
    axes[0].plot(tasks, [line.cpu_ms for line in lines], marker="o", label="CPU time of a task")
    axes[0].set(title="a step", ylabel="ms")
    axes[0].legend()
    axes[1].plot(tasks, [line.memory_mb for line in lines], marker="o")
    axes[1].set(title="memory of a task", ylabel="MB")
    axes[2].plot(tasks, [line.bytes_sent for line in lines], marker="o")
    axes[2].set(title="sent by a task in a step", ylabel="bytes")
    for axis in axes:
        axis.set(xlabel="tasks", xticks=tasks)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path)
