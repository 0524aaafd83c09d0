"""What estimators send, and the CPU time of a task, with equally many rows for each task: 1 to 4 tasks, threads.

    python benchmarks/estimator_scaling.py
    python benchmarks/estimator_scaling.py --cases boosting topics --tasks 1 4

Each case fits some steps and twice as many, and the difference is that of a step: a tree of boosting or a forest, a
pass over the documents, a step of words, with as many words for each task. A fit that does not count comes first.
`once` and `a step` are the bytes that a task gives to calls that communicate, arrays and pickles. `least` are the
bytes of the result of a step that all tasks need, without compression: for boosting the histograms of one child of
each split, with two sums of 4 bytes in a bin; for a forest the trees of a task; for topics the counts of words and
topics, with 4 bytes; for words the changes of all vectors, with 4 bytes (only vectors that changed are sent). CPU
time is that of all tasks, divided by their number, the median of some rounds; `of one` is its ratio to that of the
first number of tasks.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue.task_group import ThreadGroup

CARRIERS = ("allreduce", "allgather", "alltoall", "allgather_object")
ROWS, COLUMNS, BINS, LEAVES, TREES = 20_000, 20, 255, 31, 10
BYTES_OF_A_NODE = 4 + 1 + 4 + 1 + 8 + 8 + 8  # column, bin, child, side of missing values, value, gain, rows
DOCUMENTS, VOCABULARY, WORDS_OF_DOCUMENT, TOPICS = 2000, 2000, 100, 20
SENTENCES, DIMENSIONS, WORDS_OF_STEP = 5000, 50, 20_000


class Case(NamedTuple):
    """A fit: in this many tasks and so many times the usual steps, returning their number; the least bytes of one."""

    fit: Callable[[int, int], int]
    least: Callable[[int], float]  # of the number of tasks


class Fit(NamedTuple):
    """What a fit took: steps, bytes that the first task sent, CPU time of all tasks."""

    steps: int
    sent: int
    cpu_s: float


def random_rows(tasks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    random = np.random.default_rng(0)
    rows = random.normal(size=(tasks * ROWS, COLUMNS))
    return rows, rows[:, 0] * rows[:, 1] + random.normal(size=len(rows))


def fit_boosting(tasks: int, times: int) -> int:
    from ronde.ml import GradientBoostingRegressor

    rows, y = random_rows(tasks)
    model = GradientBoostingRegressor(
        max_iter=times * TREES, early_stopping=False, on=f"threads:{tasks}"
    ).fit(rows, y)
    return int(model.n_iter_)


def fit_forest(tasks: int, times: int) -> int:
    from ronde.ml import RandomForestRegressor

    rows, y = random_rows(tasks)
    RandomForestRegressor(times * TREES, max_leaf_nodes=LEAVES, on=f"threads:{tasks}").fit(rows, y)
    return times * TREES


def fit_topics(tasks: int, times: int) -> int:
    from scipy.sparse import csr_matrix

    from ronde.ml import LatentDirichletAllocation

    random = np.random.default_rng(0)
    counts = random.multinomial(WORDS_OF_DOCUMENT, random.dirichlet([0.05] * VOCABULARY, tasks * DOCUMENTS))
    steps = 20 * times
    LatentDirichletAllocation(TOPICS, max_iter=steps, on=f"threads:{tasks}").fit(csr_matrix(counts))
    return steps


def fit_words(tasks: int, times: int) -> int:
    from ronde.ml import Word2Vec

    random = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(VOCABULARY)])
    chosen = random.zipf(1.3, size=(tasks * SENTENCES, 20)) % VOCABULARY
    model = Word2Vec(
        vector_size=DIMENSIONS,
        epochs=4 * times,
        min_count=1,
        words_per_step=WORDS_OF_STEP * tasks,
        on=f"threads:{tasks}",
    )
    return len(model.fit([words[each].tolist() for each in chosen]).history_)


CASES = {
    "boosting": Case(fit_boosting, lambda tasks: LEAVES * COLUMNS * (BINS + 1) * 8.0),
    "forest": Case(fit_forest, lambda tasks: (2 * LEAVES - 1) * BYTES_OF_A_NODE / tasks),
    "topics": Case(fit_topics, lambda tasks: TOPICS * VOCABULARY * 4.0),
    "words": Case(fit_words, lambda tasks: 2 * VOCABULARY * DIMENSIONS * 4.0),
}


class Counter:
    """Counts the bytes that the first of the tasks gives to its group."""

    def __init__(self) -> None:
        self.sent = 0
        for name in CARRIERS:
            setattr(ThreadGroup, name, self._counted(getattr(ThreadGroup, name)))

    def _counted(self, carry: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ThreadGroup, given: Any, *arguments: Any) -> Any:
            if group.num_tasks > 1 and group.task_id == 0:
                self.sent += given.nbytes if isinstance(given, np.ndarray) else len(pickle.dumps(given, 5))
            return carry(group, given, *arguments)

        return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--tasks", nargs="+", type=int, default=[1, 2, 3, 4], help="numbers of them (default: 1 2 3 4)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: 3)")
    options = parser.parse_args()
    counter = Counter()
    print(
        f"{'case':10}{'tasks':>6}{'CPU ms':>10}{'of one':>8}{'once':>12}{'a step':>12}{'least':>12}{'ratio':>8}"
    )
    for name in options.cases:
        CASES[name].fit(1, 1)
        one_ms = None
        for tasks in options.tasks:
            cpu_ms, once, sent = step_of(CASES[name], tasks, options.rounds, counter)
            one_ms = one_ms or cpu_ms
            least = CASES[name].least(tasks)
            ratio = f"{sent / least:8.2f}" if sent else ""
            numbers = f"{cpu_ms:10.2f}{cpu_ms / one_ms:8.2f}{once:12.0f}{sent:12.0f}{least:12.0f}"
            print(f"{name:10}{tasks:6}{numbers}{ratio}", flush=True)


def step_of(case: Case, tasks: int, rounds: int, counter: Counter) -> tuple[float, float, float]:
    """Return the CPU time of a step and task in ms, the bytes that are sent once, and those of a step."""
    times_ms = []
    for _ in range(rounds):
        first, second = (measured(case, tasks, times, counter) for times in (1, 2))
        steps = second.steps - first.steps
        times_ms.append((second.cpu_s - first.cpu_s) / steps / tasks * 1e3)
    sent = (second.sent - first.sent) / steps
    return statistics.median(times_ms), first.sent - sent * first.steps, sent


def measured(case: Case, tasks: int, times: int, counter: Counter) -> Fit:
    """Fit once, and return what it took."""
    counter.sent, began_s = 0, time.process_time()
    steps = case.fit(tasks, times)
    return Fit(steps, counter.sent, time.process_time() - began_s)


if __name__ == "__main__":
    main()
