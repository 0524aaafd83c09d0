"""What `iterate.py --cases order` measures: the price of bits that do not depend on the number of tasks, in whole fits.

Each fit runs in the ranks of one job, in turns, with `sum_blocks` and with a plain sum in its place: one call of the
function for all rows of a task, and an all-reduce. All else is the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import ronde
from ronde.comqueue import IterationStep
from ronde.launch.callables import run

__all__ = ["OrderCost", "compare_orders"]


class Case(NamedTuple):
    """A fit. `outputs`: how many centers or classes."""

    algorithm: str
    rows: int
    columns: int
    outputs: int
    steps: int


class OrderCost(NamedTuple):
    """Medians of the time of a fit, in seconds, and of the ratio of a turn. `numbers`: how many a step sums."""

    name: str
    numbers: int
    blocks_s: float
    plain_s: float
    ratio: float


KMEANS, LOGISTIC = "k-means", "logistic"
CASES = [
    Case(KMEANS, 200_000, 19, 15, 10),
    Case(KMEANS, 50_000, 99, 100, 5),
    Case(KMEANS, 10_000, 499, 1_000, 2),
    Case(LOGISTIC, 100_000, 99, 3, 10),
    Case(LOGISTIC, 20_000, 499, 20, 5),
    Case(LOGISTIC, 10_000, 999, 500, 2),
]


def compare_orders(tasks: int, rounds: int) -> list[OrderCost]:
    """Print a table, and return its lines."""
    lines: list[OrderCost] = run(measure, (rounds,), np=tasks)[0]
    print(f"\nfits with `sum_blocks` and with a plain sum, {tasks} tasks")
    print(f"{'':12}{'numbers':>10}{'blocks s':>10}{'plain s':>10}{'ratio':>8}")
    for line in lines:
        print(f"{line.name:12}{line.numbers:10}{line.blocks_s:10.3f}{line.plain_s:10.3f}{line.ratio:8.2f}")
    return lines


def measure(rounds: int) -> list[OrderCost]:
    """Return the costs of all cases. All ranks call it."""
    ronde.init()
    return [measure_case(case, rounds) for case in CASES]


def measure_case(case: Case, rounds: int) -> OrderCost:
    fit, times = FITS[case.algorithm](case), []
    for number in range(rounds + 1):
        with_blocks = _time(fit)
        with plain_sums():
            times.append((with_blocks, _time(fit)))
        if not number:  # the first round was the warm-up
            times.clear()
    blocks_s, plain_s = (statistics.median(each) for each in zip(*times))
    ratio = statistics.median(blocks / plain for blocks, plain in times)
    return OrderCost(case.algorithm, case.outputs * (case.columns + 1), blocks_s, plain_s, ratio)


def _time(fit: Callable[[], Any]) -> float:
    """Return the time in which all ranks have called the function, in seconds."""
    ronde.world().barrier()
    began_s = time.perf_counter()
    fit()
    ronde.world().barrier()
    return time.perf_counter() - began_s


@contextmanager
def plain_sums() -> Iterator[None]:
    """Let `sum_blocks` call its function once for all rows of the task."""

    def sum_of_all(c: IterationStep, function: Callable[[Any], Any]) -> Any:
        return c.sum(function(c.data))

    with patch.object(IterationStep, "sum_blocks", sum_of_all):
        yield


def kmeans_fit(case: Case) -> Callable[[], Any]:
    from ronde.ml import KMeans

    X = np.random.default_rng(0).normal(size=(case.rows, case.columns))  # noqa: N806
    return lambda: KMeans(case.outputs, init=X[: case.outputs], max_iter=case.steps, tol=0).fit(X)


def logistic_fit(case: Case) -> Callable[[], Any]:
    from ronde.ml.losses import MultinomialLoss
    from ronde.ml.optimizers import LBFGS, LinearObjective

    random = np.random.default_rng(0)
    X = random.normal(size=(case.rows, case.columns))  # noqa: N806
    y = (X @ random.normal(size=(case.columns, case.outputs))).argmax(axis=1)
    objective = LinearObjective(MultinomialLoss(case.outputs), l2=1e-6)
    start = np.zeros((case.outputs, case.columns + 1))
    return lambda: LBFGS(max_iter=case.steps, tol=0).minimize(objective, {"X": X, "y": y}, start)


FITS: dict[str, Callable[[Case], Callable[[], Any]]] = {KMEANS: kmeans_fit, LOGISTIC: logistic_fit}
