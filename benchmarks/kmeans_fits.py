"""What `iterate.py --cases kmeans` compares: fits of k-means with the same rows, first centers and number of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS, PROCESSES, SKLEARN, SPARK = "ronde threads", "ronde processes", "scikit-learn", "spark"
ROWS, COLUMNS, CENTERS, STEPS = 1_000_000, 20, 16, 20

Array = NDArray[Any]
Fit = Callable[[Array, Array, int], Any]  # of rows, first centers, number of tasks


def kmeans_fits(contestants: Sequence[str], tasks: int) -> dict[str, Callable[[], Any]]:
    """Return the fits by contestant."""
    data = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    return {
        name: spark_fit(tasks) if name == SPARK else partial(FITS[name], data, data[:CENTERS], tasks)
        for name in contestants
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
