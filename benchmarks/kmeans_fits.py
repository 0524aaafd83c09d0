"""What `iterate.py --cases kmeans` compares: fits of k-means with the same rows, first centers and number of steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS, PROCESSES, SKLEARN, SPARK = "ronde threads", "ronde processes", "scikit-learn", "spark"
ROWS, COLUMNS, CENTERS, STEPS = 1_000_000, 20, 16, 20

Array = NDArray[Any]
Fit = Callable[[Array, Array, int], Any]  # of rows, first centers, number of tasks


def measure_kmeans(contestants: Sequence[str], tasks: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the medians of CPU time and time of a fit by contestant, in seconds.

    They take turns. The CPU time is that of this process and all that it has started, the JVM too.
    """
    data = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    fits: dict[str, Callable[[], Any]] = {}
    for name in contestants:
        fits[name] = spark_fit(tasks) if name == SPARK else partial(FITS[name], data, data[:CENTERS], tasks)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in fits}
    for number in range(rounds + 1):
        for name, fit in fits.items():
            began_cpu_s, began_s = cpu_s(), time.perf_counter()
            fit()
            if number:  # the first round was the warm-up
                times[name].append((cpu_s() - began_cpu_s, time.perf_counter() - began_s))
    return {
        name: (statistics.median(cpu for cpu, _ in took), statistics.median(wall for _, wall in took))
        for name, took in times.items()
    }


def fit_ronde(rows: Array, start: Array, on: str) -> Any:
    from ronde.ml import KMeans

    return KMeans(len(start), init=start, max_iter=STEPS, tol=0, on=on).fit(rows)


def fit_sklearn(rows: Array, start: Array, tasks: int) -> Any:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(tasks):
        return KMeans(len(start), init=start, n_init=1, max_iter=STEPS, tol=0, algorithm="lloyd").fit(rows)


def spark_fit(tasks: int) -> Callable[[], Any]:
    """Return a fit of Spark's MLlib. Its rows are drawn in Spark from the same distribution, and so are the centers."""
    from pyspark.ml.clustering import KMeans
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import randn

    session = (
        SparkSession.builder.master(f"local[{tasks}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    columns = [randn(seed=number).alias(f"x{number}") for number in range(COLUMNS)]
    table = session.range(ROWS, numPartitions=tasks).select(*columns)
    assembler = VectorAssembler(inputCols=[f"x{number}" for number in range(COLUMNS)], outputCol="features")
    rows = assembler.transform(table).select("features").cache()
    rows.count()
    model = KMeans(k=CENTERS, initMode="random", seed=0, maxIter=STEPS, tol=0.0)
    return lambda: model.fit(rows)


FITS: dict[str, Fit] = {
    THREADS: lambda rows, start, tasks: fit_ronde(rows, start, f"threads:{tasks}"),
    PROCESSES: lambda rows, start, tasks: fit_ronde(rows, start, f"local:{tasks}"),
    SKLEARN: fit_sklearn,
}


def cpu_s() -> float:
    """Return the CPU time of this process, of those that it has started, and of those that these have started."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended; its parent's sum contains it
            continue
        stats[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    family = {os.getpid()}
    while more := {pid for pid, (parent, _) in stats.items() if parent in family} - family:
        family |= more
    return sum(stats[pid][1] for pid in family) / os.sysconf("SC_CLK_TCK")
