"""Measures iterative algorithms: a step that only communicates, and fits of estimators.

    python benchmarks/iterate.py --csv iterate.csv
    python benchmarks/iterate.py --cases kmeans logistic --rounds 3      # with the extra `ml`

Case `steps`: a step sums an array of float64 over all tasks. The contestants run in one set of processes, in turns of
as many steps as take some 20 ms: `queue` is an IterativeComQueue with AllReduce, `iterate` the step function of
`iterate`, and `allreduce` the bare call of the communicator, which they are held against. `blocks` sums a function over
64 row blocks in the fixed tree, and `loop` over the same blocks in the order of rows, so their difference is the price
of bits that do not depend on the tasks. The table shows medians over rounds, of task 0. With PySpark installed,
`--contestants queue iterate allreduce spark` adds Spark's way of iterating: a job for each step.

Case `kmeans`: 20 steps with 16 centers on 1,000,000 x 20 float64. Ronde in threads and in processes is held against
scikit-learn with as many threads, the same rows and the same first centers; where PySpark is installed, Spark's MLlib
takes part. The table shows the medians of the CPU time of all processes, and of the time, in seconds.

Case `logistic`: a logistic regression of 200,000 x 100 float64 by L-BFGS, the same contestants. All have the same rows
and minimize the same objective. A line shows its least value, and by how much each contestant's weights exceed it.

Case `linear`: small fits, a wide `Lasso` and a sparse `LogisticRegression` against scikit-learn, by CPU time
(`linear_fits.py`).

Case `order`: whole fits of k-means and of a logistic regression with `sum_blocks`, and with a plain sum over each
task's rows and an all-reduce in its place. A step sums 300 to 500,000 numbers. The ratio is the price of bits that do
not depend on the tasks.

Case `lost`: 20 steps of 50 ms in two processes, and in two tasks of a cluster that is this machine: without
checkpoints, with one every 5 steps, and so that in step 7 a task is killed. The table shows seconds, with the start of
the tasks. A second table shows the time of a step that saves a checkpoint of 4 MB from each task, and of one without.

Case `weak`: 20 steps of k-means in 1 to 4 processes, with 200,000 rows for each of them. The table shows the median
time and CPU time of a step, the memory of a task, and the bytes that it gives to the communication of a step, each of
the task that has most. `--plot FILE` draws them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fixed_order
import kmeans_fits
import linear_fits
import logistic_fits
import lost_tasks
import numpy as np
import weak_scaling
from case_tables import print_load, write_cases
from fit_times import measure_fits, print_fits

import ronde
from ronde.comqueue import AllReduce, IterationStep, IterativeComQueue, iterate
from ronde.launch.callables import run

COLUMNS = "case,tasks,contestant,median_us"
QUEUE, ITERATE, BLOCKS, LOOP, BARE, SPARK = "queue", "iterate", "blocks", "loop", "allreduce", "spark"
SIZES = (15, 500_000)
TURN_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=2, help="number of tasks (default: 2)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant (default: 15)")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["steps"],
        choices=["steps", "kmeans", "logistic", "linear", "order", "lost", "weak"],
    )
    parser.add_argument(
        "--contestants", nargs="+", default=[QUEUE, ITERATE, BLOCKS, LOOP, BARE], choices=[*STEPS, SPARK]
    )
    parser.add_argument("--csv", type=Path, help="write the medians into this file")
    parser.add_argument("--plot", type=Path, help="draw case `weak` into this file")
    options = parser.parse_args()
    print_load()
    rows: list[tuple[str, int, str, float]] = []
    if "steps" in options.cases:
        rows += compare_steps(options.contestants, options.tasks, options.rounds)
    if "kmeans" in options.cases:
        rows += compare_kmeans(options.tasks, options.rounds)
    if "logistic" in options.cases:
        rows += compare_logistic(options.tasks, options.rounds)
    if "linear" in options.cases:
        for name, ours, theirs in linear_fits.compare_linear_fits(options.rounds):
            rows += [(name, 1, "ronde", ours * 1e6), (name, 1, "scikit-learn", theirs * 1e6)]
    if "order" in options.cases:
        for cost in fixed_order.compare_orders(options.tasks, options.rounds):
            case = f"order {cost.name} {cost.numbers}"
            rows.append((case, options.tasks, "blocks", cost.blocks_s * 1e6))
            rows.append((case, options.tasks, "plain", cost.plain_s * 1e6))
    if "lost" in options.cases:
        rows += [
            ("lost", 2, name, took_s * 1e6) for name, took_s in lost_tasks.compare(options.rounds).items()
        ]
    if "weak" in options.cases:
        lines = weak_scaling.compare_tasks()
        rows += [("weak", line.tasks, "iterate", line.step_ms * 1e3) for line in lines]
        if options.plot:
            weak_scaling.plot_scaling(options.plot, lines)
    if options.csv:
        write_cases(options.csv, COLUMNS, rows)


def compare_steps(contestants: list[str], tasks: int, rounds: int) -> list[tuple[str, int, str, float]]:
    """Print a table for each size, and return the rows of the file."""
    here = [name for name in contestants if name != SPARK]
    rows = []
    for size in SIZES:
        medians = run(measure, (here, size, rounds), np=tasks)[0]
        if SPARK in contestants:
            medians[SPARK] = measure_spark(size, tasks, rounds)
        print(f"\na step with a sum of {size} float64, {tasks} tasks")
        print(f"{'':12}{'median us':>12}{'/' + BARE:>12}")
        for name, median in medians.items():
            ratio = f"{median / medians[BARE]:.2f}" if BARE in medians else "-"
            print(f"{name:12}{median:12.1f}{ratio:>12}", flush=True)
        rows += [(f"sum {size}", tasks, name, median) for name, median in medians.items()]
    return rows


def compare_kmeans(tasks: int, rounds: int) -> list[tuple[str, int, str, float]]:
    """Print a table, and return the rows of the file."""
    fits = kmeans_fits.kmeans_fits(contestants_of_fits(), tasks)
    title = f"k-means, {kmeans_fits.ROWS} x {kmeans_fits.COLUMNS}, {kmeans_fits.STEPS} steps, {tasks} tasks"
    times = measure_fits(fits, rounds)
    print_fits(title, times, kmeans_fits.SKLEARN)
    return [("kmeans", tasks, name, each.wall_s * 1e6) for name, each in times.items()]


def compare_logistic(tasks: int, rounds: int) -> list[tuple[str, int, str, float]]:
    """Print a table, and return the rows of the file."""
    fits = logistic_fits.logistic_fits(contestants_of_fits(), tasks)
    title = f"logistic regression, {logistic_fits.ROWS} x {logistic_fits.COLUMNS}, {tasks} tasks"
    times = measure_fits(fits, rounds)
    print_fits(title, times, logistic_fits.SKLEARN)
    weights = {name: each.result() for name, each in times.items()}
    least, excess = logistic_fits.excess_over_minimum(weights)
    print(
        f"least objective {least:.9f}; above it:", ", ".join(f"{name} {x:.1e}" for name, x in excess.items())
    )
    return [("logistic", tasks, name, each.wall_s * 1e6) for name, each in times.items()]


def contestants_of_fits() -> list[str]:
    """Return who takes part in fits: Spark, too, if it is installed."""
    contestants = [kmeans_fits.THREADS, kmeans_fits.PROCESSES, kmeans_fits.SKLEARN]
    return [*contestants, kmeans_fits.SPARK] if find_spec("pyspark") else contestants


def measure(contestants: list[str], size: int, rounds: int) -> dict[str, float]:
    """Return the median time of a step of each contestant, in microseconds. All ranks call it."""
    ronde.init()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    steps = dict.fromkeys(contestants, 10)
    for number in range(rounds + 2):
        for name in contestants:
            took_s = STEPS[name](size, steps[name])
            if number == 1:  # the first turn was the warm-up; all ranks take the numbers of rank 0
                wanted = ronde.broadcast_object(int(TURN_S / took_s), name="steps")
                steps[name] = min(max(10, wanted), 5000)
            elif number > 1:
                times[name].append(took_s * 1e6)
    return {name: statistics.median(took) for name, took in times.items()}


def time_queue(size: int, steps: int) -> float:
    """Return the time of a step of a queue, in seconds."""
    clock = _Clock(steps)
    queue = IterativeComQueue().init_with_broadcast_data("x", np.zeros(size)).set_max_iter(steps)
    queue.add(lambda context: clock.note(context.step_no)).add(AllReduce("x"))
    return float(queue.close_with(lambda context: clock.mean_s()).exec()[0])


def time_iterate(size: int, steps: int) -> float:
    """Return the time of a step of `iterate`, in seconds."""
    clock = _Clock(steps)

    def step(c: IterationStep) -> None:
        clock.note(c.step_no)
        c.state.x = c.sum(c.state.x)
        c.state._time_s = clock.mean_s()

    state = {"x": np.zeros(size), "_time_s": 0.0}
    return float(iterate(step, data=[0] * ronde.size(), state=state, max_iter=steps).state._time_s)


def time_blocks(size: int, steps: int) -> float:
    """Return the time of a step that sums a function over row blocks, in seconds."""
    return _time_blocks(lambda c, product: c.sum_blocks(product), size, steps)


def time_loop(size: int, steps: int) -> float:
    """Return the time of a step that sums the same function over the same blocks in the order of rows, in seconds."""

    def total(c: IterationStep, product: Callable[[Any], Any]) -> Any:
        first, *others = c.blocks
        mine = product(first)
        for block in others:
            mine += product(block)
        return c.sum(mine)

    return _time_blocks(total, size, steps)


def _time_blocks(total: Callable[[IterationStep, Callable[[Any], Any]], Any], size: int, steps: int) -> float:
    clock = _Clock(steps)

    def step(c: IterationStep) -> None:
        clock.note(c.step_no)
        c.state.x = total(c, lambda rows: rows[0] * c.state.x)
        c.state._time_s = clock.mean_s()

    state = {"x": np.zeros(size), "_time_s": 0.0}
    return float(iterate(step, data=np.ones(64), state=state, max_iter=steps).state._time_s)


def time_allreduce(size: int, steps: int) -> float:
    """Return the time of a bare all-reduce in place, in seconds."""
    world, x = ronde.world(), np.zeros(size)
    world.barrier()
    began_s = time.perf_counter()
    for _ in range(steps):
        world.allreduce(x, out=x)
    return (time.perf_counter() - began_s) / steps


class _Clock:
    """The mean time from step to step."""

    def __init__(self, steps: int) -> None:
        self._steps, self._began_s, self._last_s = steps, 0.0, 0.0

    def note(self, step_no: int) -> None:
        self._last_s = time.perf_counter()
        if step_no == 1:
            self._began_s = self._last_s

    def mean_s(self) -> float:
        return (self._last_s - self._began_s) / (self._steps - 1)


STEPS: dict[str, Callable[[int, int], float]] = {
    QUEUE: time_queue,
    ITERATE: time_iterate,
    BLOCKS: time_blocks,
    LOOP: time_loop,
    BARE: time_allreduce,
}


def measure_spark(size: int, tasks: int, rounds: int) -> float:
    """Return the median time of a Spark job that sums an array of each task, in microseconds."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master(f"local[{tasks}]").config("spark.ui.enabled", "false").getOrCreate()
    data: Any = session.sparkContext.parallelize(range(tasks), tasks).map(lambda _: np.zeros(size)).cache()
    times = []
    for number in range(rounds + 3):
        began_s = time.perf_counter()
        data.reduce(np.add)
        if number > 2:
            times.append((time.perf_counter() - began_s) * 1e6)
    session.stop()
    return statistics.median(times)


if __name__ == "__main__":
    main()
