"""What `iterate.py --cases linear` compares: fits of linear models against scikit-learn's, by CPU time.

- small: iris, 150 x 4, each linear model.
- wide: `Lasso` of 200 x 5,000 with several penalties.
- sparse: `LogisticRegression` of 20,000 x 5,000, of which 1 % are not 0, with two tolerances.

Both get the same rows, the same `tol` or their defaults, and one thread of BLAS. The last column is by how much the
objective of Ronde's model exceeds that of scikit-learn's: below 0, Ronde's is closer to the minimum.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["compare_linear_fits"]

Array = NDArray[Any]


class Contest(NamedTuple):
    """Two models, their data, and the objective of a fitted one (None: it is not compared)."""

    name: str
    ronde: Any
    sklearn: Any
    X: Any
    y: Array
    objective: Callable[[Any, Any, Array], float] | None = None


def compare_linear_fits(rounds: int) -> list[tuple[str, float, float]]:
    """Print a table. Return the name of each contest, and the CPU seconds of a fit of Ronde's and of scikit-learn's."""
    from threadpoolctl import threadpool_limits

    print(f"\n{'':36}{'ronde ms':>10}{'sklearn ms':>12}{'ratio':>8}{'objective':>12}")
    rows = []
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # some of scikit-learn's do not converge
        for contest in contests():
            models = contest.ronde, contest.sklearn
            ours, theirs = cpu_times(models, contest.X, contest.y, rounds)
            excess = ""
            if contest.objective is not None:
                values = [contest.objective(model, contest.X, contest.y) for model in models]
                excess = f"{values[0] - values[1]:12.1e}"
            print(
                f"{contest.name:36}{ours * 1e3:10.2f}{theirs * 1e3:12.2f}{ours / theirs:8.2f}{excess}",
                flush=True,
            )
            rows.append((contest.name, ours, theirs))
    return rows


def cpu_times(models: tuple[Any, Any], X: Any, y: Array, rounds: int) -> list[float]:  # noqa: N803
    """Return the median CPU time of a fit of each model, in seconds. They take turns."""
    times: list[list[float]] = [[] for _ in models]
    for number in range(rounds + 1):
        for model, took in zip(models, times):
            began = time.process_time()
            model.fit(X, y)
            if number:  # the first round was the warm-up
                took.append(time.process_time() - began)
    return [statistics.median(took) for took in times]


def contests() -> Iterator[Contest]:
    yield from small_contests()
    yield from wide_contests()
    yield from sparse_contests()


def small_contests() -> Iterator[Contest]:
    import sklearn.linear_model
    import sklearn.svm
    from sklearn.datasets import load_iris

    import ronde.ml

    X, y = load_iris(return_X_y=True)  # noqa: N806
    options: dict[str, dict[str, Any]] = {
        "LinearRegression": {},
        "Ridge": {},
        "Lasso": {"alpha": 0.01},
        "ElasticNet": {"alpha": 0.01},
        "LogisticRegression": {"max_iter": 500},
        "LinearSVC": {},
        "Perceptron": {},
    }
    for name, given in options.items():
        theirs = getattr(sklearn.svm if name == "LinearSVC" else sklearn.linear_model, name)
        yield Contest(f"iris, {name}", getattr(ronde.ml, name)(**given), theirs(**given), X, y)


def wide_contests() -> Iterator[Contest]:
    import sklearn.linear_model

    import ronde.ml

    random = np.random.default_rng(0)
    X = random.normal(size=(200, 5000))  # noqa: N806
    y = X[:, :20] @ random.normal(size=20) + 0.1 * random.normal(size=200)
    for alpha in (0.3, 0.1, 0.03, 0.01):
        name = f"200 x 5,000, Lasso({alpha})"
        yield Contest(name, ronde.ml.Lasso(alpha), sklearn.linear_model.Lasso(alpha), X, y, lasso_objective)


def sparse_contests() -> Iterator[Contest]:
    import sklearn.linear_model
    from scipy.sparse import random_array

    import ronde.ml

    random = np.random.default_rng(0)
    X = random_array((20_000, 5000), density=0.01, format="csr", rng=1)  # noqa: N806
    y = X @ random.normal(size=5000) + 0.3 * random.normal(size=20_000) > 0
    for tol in (1e-4, 1e-6):
        options: dict[str, Any] = {"max_iter": 1000, "tol": tol}
        ours = ronde.ml.LogisticRegression(**options)
        theirs = sklearn.linear_model.LogisticRegression(**options)
        yield Contest(f"CSR, LogisticRegression(tol={tol})", ours, theirs, X, y, logistic_objective)


def lasso_objective(model: Any, X: Any, y: Array) -> float:  # noqa: N803
    return float(np.square(model.predict(X) - y).mean() / 2 + model.alpha * np.abs(model.coef_).sum())


def logistic_objective(model: Any, X: Any, y: Array) -> float:  # noqa: N803
    scores = model.decision_function(X)
    losses = np.logaddexp(0, np.where(y, -scores, scores))
    return float(losses.sum() + np.square(model.coef_).sum() / 2)
