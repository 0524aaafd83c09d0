"""What `iterate.py --cases logistic` compares: fits of a logistic regression to the same loss.

All minimize the mean loss plus L2 * sum w_j^2, the intercept not penalized. Each fit returns a function that returns
the objective which it has reached; with these tolerances they agree to 6 digits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS, PROCESSES, SKLEARN, SPARK = "ronde threads", "ronde processes", "scikit-learn", "spark"
ROWS, COLUMNS = 200_000, 100
L2 = 1 / (2 * ROWS)  # that of scikit-learn's C = 1

Array = NDArray[Any]
Fit = Callable[[], Callable[[], float]]


def logistic_fits(contestants: list[str], tasks: int) -> dict[str, Fit]:
    """Return the fits by contestant."""
    random = np.random.default_rng(0)
    X, factors = random.normal(size=(ROWS, COLUMNS)), true_factors()  # noqa: N806
    y = np.where(random.random(ROWS) < 1 / (1 + np.exp(-X @ factors)), 1.0, -1.0)
    fits: dict[str, Fit] = {
        THREADS: partial(fit_ronde, X, y, f"threads:{tasks}"),
        PROCESSES: partial(fit_ronde, X, y, f"local:{tasks}"),
        SKLEARN: partial(fit_sklearn, X, y, tasks),
    }
    return {name: spark_fit(tasks) if name == SPARK else fits[name] for name in contestants}


def true_factors() -> Array:
    """Return the factors from which the classes are drawn."""
    return np.random.default_rng(1).normal(size=COLUMNS) * 0.3


def fit_ronde(X: Array, y: Array, on: str) -> Callable[[], float]:  # noqa: N803
    from ronde.ml.losses import LogisticLoss
    from ronde.ml.optimizers import LBFGS, LinearObjective

    objective = LinearObjective(LogisticLoss(), l2=L2)
    result = LBFGS(tol=1e-4).minimize(objective, {"X": X, "y": y}, np.zeros(COLUMNS + 1), on=on)
    return lambda: result.loss


def fit_sklearn(X: Array, y: Array, tasks: int) -> Callable[[], float]:  # noqa: N803
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    with threadpool_limits(tasks):
        model = LogisticRegression(C=1.0, tol=1e-4, max_iter=1000).fit(X, y)

    def objective() -> float:
        margins = y * model.decision_function(X)
        return float(np.mean(np.logaddexp(0, -margins)) + L2 * np.sum(model.coef_**2))

    return objective


def spark_fit(tasks: int) -> Fit:
    """Return a fit of Spark's MLlib. Its rows are drawn in Spark from the same distribution."""
    from functools import reduce
    from operator import add

    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import col, exp, rand, randn

    session = (
        SparkSession.builder.master(f"local[{tasks}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    names = [f"x{number}" for number in range(COLUMNS)]
    table = session.range(ROWS, numPartitions=tasks).select(
        *[randn(seed=number).alias(name) for number, name in enumerate(names)],
        rand(seed=COLUMNS).alias("chance"),
    )
    score = reduce(add, [col(name) * float(factor) for name, factor in zip(names, true_factors())])
    labelled = table.withColumn("label", (col("chance") < 1 / (1 + exp(-score))).cast("double"))
    assembler = VectorAssembler(inputCols=names, outputCol="features")
    rows = assembler.transform(labelled).select("features", "label").cache()
    rows.count()
    model = LogisticRegression(regParam=2 * L2, standardization=False, tol=1e-6, maxIter=1000)

    def fit() -> Callable[[], float]:
        fitted = model.fit(rows)
        return lambda: float(fitted.summary.objectiveHistory[-1])

    return fit
