"""k-means in both forms of the queue, for tasks in other processes, and functions that fail there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ronde
from ronde.comqueue import AllReduce, ComContext, ComputeFunction, IterationStep, IterativeComQueue, iterate


def partial_sums(points: NDArray[Any], centers: NDArray[Any]) -> NDArray[Any]:
    """Return the matrix k x (d + 1) of the sums and numbers of the points that are nearest to each center."""
    nearest = ((points[:, None, :] - centers) ** 2).sum(axis=2).argmin(axis=1)
    sums = np.zeros((len(centers), points.shape[1] + 1))
    np.add.at(sums, nearest, np.c_[points, np.ones(len(points))])
    return sums


def assign(context: ComContext) -> None:
    context.put_obj("sums", partial_sums(context.get_obj("points"), context.get_obj("centers")))


def update(context: ComContext) -> None:
    sums = context.get_obj("sums")
    centers = sums[:, :-1] / sums[:, -1:]
    context.put_obj("moved", abs(centers - context.get_obj("centers")).max())
    context.put_obj("centers", centers)


def has_converged(context: ComContext) -> bool:
    return bool(context.get_obj("moved") < 1e-12)


def result(context: ComContext) -> tuple[int, NDArray[Any], NDArray[Any]]:
    return context.step_no, context.get_obj("centers"), context.get_obj("sums")


def queue_of(points: NDArray[Any], start: NDArray[Any]) -> IterativeComQueue:
    queue = IterativeComQueue().set_max_iter(50).set_compare_criterion_of_node0(has_converged)
    queue.init_with_partitioned_data("points", points).init_with_broadcast_data("centers", start)
    return queue.add(assign).add(AllReduce("sums")).add(update).close_with(result)


def step(c: IterationStep) -> None:
    sums = c.sum(partial_sums(c.data, c.state.centers))
    centers = sums[:, :-1] / sums[:, -1:]
    c.stop_if(abs(centers - c.state.centers).max() < 1e-12)
    c.state.centers = centers


class LosingStep:
    """The step of k-means. In step 7 it loses task 1, unless the file exists that it then creates."""

    def __init__(self, flag: Path, how: str) -> None:
        self._flag, self._how = flag, how

    def __call__(self, c: IterationStep) -> None:
        if (c.task_id, c.step_no) == (1, 7) and not self._flag.exists():
            self._flag.touch()
            lose_task(self._how)
        step(c)


def centers_after_loss(
    flag: Path, on: str, how: str = "kill", folder: str | None = None
) -> tuple[bytes, int]:
    """Return the bits of the centers after 20 steps, in which they do not converge, and the number of steps.

    `flag`, `how`: as of `LosingStep`.
    """
    points = np.random.default_rng(0).uniform(size=(2000, 2))
    result = iterate(
        LosingStep(flag, how),
        data=points,
        state={"centers": points[:12]},
        max_iter=20,
        on=on,
        checkpoint_every=3,
        checkpoint_folder=folder,
    )
    return result.state.centers.tobytes(), result.steps


def sum_blocks_step(c: IterationStep) -> None:
    c.state.small = c.sum_blocks(lambda rows: {"rows": rows.sum(axis=0), "n": len(rows)})
    c.state.large = c.sum_blocks(lambda rows: np.outer(np.arange(40_000) / 3, rows.sum(axis=0)))


def centers_in_a_job(points: NDArray[Any], start: NDArray[Any]) -> NDArray[Any]:
    ronde.init()
    centers: NDArray[Any] = iterate(step, data=points, state={"centers": start}, max_iter=50).state.centers
    return centers


def fail_on_task_1(context: ComContext) -> None:
    if (context.task_id, context.step_no) == (1, 2):
        raise ValueError("no luck")


def die_on_task_1(context: ComContext) -> None:
    if (context.task_id, context.step_no) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)


def lose_task(how: str) -> None:
    """End this task. `how`: "exception"; "kill" this process; or "lose" the process of the cluster above the agent."""
    if how == "exception":
        raise ValueError("no luck")
    os.kill(os.getpid() if how == "kill" else _task(), signal.SIGKILL)
    time.sleep(600)


def _task() -> int:
    """Return the process of the cluster's task, of which the agent above this rank is a child."""
    pid = os.getppid()
    while (
        "agent_main" not in Path(f"/proc/{pid}/cmdline").read_text()
    ):  # a template, from which the rank was forked
        pid = _parent_of(pid)
    return _parent_of(pid)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


class NoisyMean(ComputeFunction):
    """Adds noise from a generator of the task, and fails on task 1 at a step, once. `how`: as of `lose_task`."""

    def __init__(self, flag: str, at_step: int, how: str) -> None:
        self.flag, self.at_step, self.how = flag, at_step, how

    def calc(self, context: ComContext) -> None:
        if context.step_no == 1:
            context.put_obj("random", np.random.default_rng(context.task_id))
            context.put_obj("mean", np.zeros(3))
        if (context.task_id, context.step_no) == (1, self.at_step) and not os.path.exists(self.flag):
            with open(self.flag, "x"):
                pass
            lose_task(self.how)
        noise = context.get_obj("random").normal(size=3)
        context.put_obj("sum", context.get_obj("rows").mean(axis=0) + noise)


class StepLog(ComputeFunction):
    """Appends the numbers of the steps of task 0 to a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def calc(self, context: ComContext) -> None:
        if context.task_id == 0:
            with open(self.path, "a") as file:
                file.write(f"{context.step_no}\n")


def add_to_mean(context: ComContext) -> None:
    context.put_obj("mean", context.get_obj("mean") * 0.9 + context.get_obj("sum"))


def noisy_queue(flag: str, at_step: int = 7, how: str = "kill") -> IterativeComQueue:
    queue = IterativeComQueue().init_with_partitioned_data("rows", np.arange(30.0).reshape(10, 3))
    queue.add(NoisyMean(flag, at_step, how)).add(AllReduce("sum")).add(add_to_mean).set_max_iter(20)
    return queue.close_with(mean_and_step)


def mean_and_step(context: ComContext) -> tuple[NDArray[Any], int]:
    return context.get_obj("mean"), context.step_no
