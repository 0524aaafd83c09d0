"""What `iterate.py --cases logistic` compares: fits of a logistic regression of the same rows to the same loss.

All minimize the mean loss plus L2 * sum w_j^2, the intercept not penalized. Each fit returns a function that returns
its weights, the intercept last. `excess_over_minimum` evaluates the objective at the weights of all fits alike. The
tolerances, each library's own kind, are such that all end 2e-7 above the minimum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS, PROCESSES, SKLEARN, SPARK = "ronde threads", "ronde processes", "scikit-learn", "spark"
ROWS, COLUMNS = 200_000, 100
L2 = 1 / (2 * ROWS)  # that of scikit-learn's C = 1

Array = NDArray[Any]
Fit = Callable[[], Callable[[], Array]]


def logistic_fits(contestants: list[str], tasks: int) -> dict[str, Fit]:
    """Return the fits by contestant."""
    X, y = rows_and_classes()  # noqa: N806
    fits: dict[str, Callable[[], Fit]] = {
        THREADS: lambda: partial(fit_ronde, X, y, f"threads:{tasks}"),
        PROCESSES: lambda: partial(fit_ronde, X, y, f"local:{tasks}"),
        SKLEARN: lambda: partial(fit_sklearn, X, y, tasks),
        SPARK: lambda: spark_fit(X, y, tasks),
    }
    return {name: fits[name]() for name in contestants}


def rows_and_classes() -> tuple[Array, Array]:
    """Return the rows and their classes, -1 or 1."""
    random = np.random.default_rng(0)
    X, factors = random.normal(size=(ROWS, COLUMNS)), true_factors()  # noqa: N806
    return X, np.where(random.random(ROWS) < 1 / (1 + np.exp(-X @ factors)), 1.0, -1.0)


def true_factors() -> Array:
    """Return the factors from which the classes are drawn."""
    return np.random.default_rng(1).normal(size=COLUMNS) * 0.3


def fit_ronde(X: Array, y: Array, on: str) -> Callable[[], Array]:  # noqa: N803
    from ronde.ml.losses import LogisticLoss
    from ronde.ml.optimizers import LBFGS, LinearObjective

    objective = LinearObjective(LogisticLoss(), l2=L2)
    result = LBFGS(tol=1e-4).minimize(objective, {"X": X, "y": y}, np.zeros(COLUMNS + 1), on=on)
    return lambda: result.w


def fit_sklearn(X: Array, y: Array, tasks: int) -> Callable[[], Array]:  # noqa: N803
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    with threadpool_limits(tasks):
        model = LogisticRegression(C=1.0, tol=1e-4, max_iter=1000).fit(X, y)

    return lambda: np.append(model.coef_, model.intercept_)


def spark_fit(X: Array, y: Array, tasks: int) -> Fit:  # noqa: N803
    """Return a fit of Spark's MLlib. Spark reads the rows from a file, and keeps them in its memory."""
    import pyarrow as pa
    from pyarrow import parquet
    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(f"local[{tasks}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    names = [f"x{number}" for number in range(COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table([*X.T, (y > 0).astype(float)], names=[*names, "label"])
        parquet.write_table(table, f"{folder}/rows.parquet", row_group_size=-(-ROWS // tasks))
        assembler = VectorAssembler(inputCols=names, outputCol="features")
        read = session.read.parquet(folder).repartition(tasks)
        rows = assembler.transform(read).select("features", "label").cache()
        rows.count()
    model = LogisticRegression(regParam=2 * L2, standardization=False, tol=1e-3, maxIter=1000)

    def fit() -> Callable[[], Array]:
        fitted = model.fit(rows)
        return lambda: np.append(fitted.coefficients.toArray(), fitted.intercept)

    return fit


def excess_over_minimum(weights: Mapping[str, Array]) -> tuple[float, dict[str, float]]:
    """Return the minimum of the objective, and by how much the objective exceeds it at each of the given weights.

    The minimum is found by Newton's method, and all values are computed in extended precision.
    """
    X, y = rows_and_classes()  # noqa: N806
    X = np.column_stack([X, np.ones(ROWS)])  # noqa: N806
    penalty = np.append(np.full(COLUMNS, 2 * L2), 0.0)
    best = np.zeros(COLUMNS + 1)
    for _ in range(10):
        chances = 1 / (1 + np.exp(y * (X @ best)))  # of the other class
        gradient = -(X.T @ (y * chances)) / ROWS + penalty * best
        hessian = (X.T * (chances * (1 - chances))) @ X / ROWS + np.diag(penalty)
        best -= np.linalg.solve(hessian, gradient)

    def objective(w: Array) -> np.longdouble:
        losses = np.logaddexp(np.longdouble(0), -(y * (X @ w)).astype(np.longdouble))
        squares = penalty / 2 * w.astype(np.longdouble) ** 2
        return np.longdouble(losses.mean() + squares.sum())

    least = objective(best)
    return float(least), {name: float(objective(w) - least) for name, w in weights.items()}
