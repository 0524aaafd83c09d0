"""Fits of gradient boosting and forests: those of Ronde, scikit-learn, XGBoost and LightGBM, with the same rows.

    python benchmarks/tree_fits.py --sizes 1000x20x31 100000x50x31 1000000x28x255 --threads 2
    python benchmarks/tree_fits.py --data categorical --sizes 100000x50x31 --threads 1
    python benchmarks/tree_fits.py --forests --sizes 1000x20 100000x50 --threads 1
    python benchmarks/tree_fits.py --spark --sizes 100000x20x5 --steps 20
    python benchmarks/tree_fits.py --spark --forests random-forest --sizes 100000x20x10 --steps 20

Each fit runs in a separate process, and contestants take turns. A size is rows x columns x leaves; the trees of forests
have no limit of leaves. The table has the CPU time and the time of a fit, the time to predict 20,000 rows, and how good
the predictions of these are. On a busy machine, compare CPU times with one thread: those of threads that wait for each
other grow with the load.

With `--spark`, Ronde and Spark ML grow trees of equal depth, the third number of a size. Spark's processor time is that
of its JVM too, for a second fit, whose rows it has in its memory.

Of sparse rows, a tenth of the numbers are not 0; scikit-learn gets them as a dense array. Of categorical rows, half of
the columns are categories, 30 each.

LightGBM has no bootstrap: its trees take 63 % of the rows, the part that a bootstrap draws. Its leaves keep 20 rows,
because its forest averages logarithms of odds, which are infinite for pure leaves.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fit_times import cpu_s
from numpy.typing import NDArray

CONTESTANTS = ("ronde", "scikit-learn", "xgboost", "lightgbm", "spark")
FORMS = ("dense", "sparse", "categorical")
CATEGORIES = 30
TEST_ROWS = 20_000
TIMES = ("cpu_s", "wall_s", "predict_cpu_s")
FORESTS = ("random-forest", "extra-trees", "random-forest-of-numbers", "extra-trees-of-numbers")
SIZES = ["1000x20x31", "100000x50x31", "1000000x28x255"]
SIZES_OF_FORESTS = ["1000x20", "100000x50"]

Array = NDArray[Any]


def make_rows(rows: int, columns: int, form: str, are_numbers: bool = False) -> tuple[Any, Array]:
    """Return rows, float32, and two classes, or numbers, that depend on eight of the columns. `form`: of FORMS."""
    random = np.random.default_rng(0)
    data = random.normal(size=(rows, columns)).astype(np.float32)
    if form == "sparse":
        data[random.random(data.shape) > 0.1] = 0
    score = data[:, 0] * data[:, 1] + np.sin(2 * data[:, 2]) + data[:, 3] ** 2 / 2 - np.abs(data[:, 4])
    score += data[:, 5] * data[:, 6] * data[:, 7] / 2
    if form == "categorical":
        effects = random.normal(size=CATEGORIES)
        data[:, ::2] = random.integers(0, CATEGORIES, size=data[:, ::2].shape)
        score = effects[data[:, 0].astype(int)] * data[:, 1] + effects[data[:, 2].astype(int)] + data[:, 3]
    noisy = score + 0.7 * random.logistic(size=rows)
    if form == "sparse":
        from scipy.sparse import csr_matrix

        data = csr_matrix(data)
    return data, noisy if are_numbers else (noisy > score.mean()).astype(int)


def model_of(
    contestant: str, leaves: int, steps: int, threads: int, columns: int, categories: list[int]
) -> Any:
    """Return a classifier that is not fitted. `categories`: which columns are. Raises ModuleNotFoundError."""
    named: dict[str, Any] = {"max_iter": steps, "max_leaf_nodes": leaves, "early_stopping": False}
    if contestant == "ronde":
        from ronde.ml import GradientBoostingClassifier

        return GradientBoostingClassifier(**named, categorical_features=categories or None)
    if contestant == "scikit-learn":
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(**named, categorical_features=categories or None)
    if contestant == "xgboost":
        from xgboost import XGBClassifier

        return XGBClassifier(
            n_estimators=steps,
            max_leaves=leaves,
            max_depth=0,
            grow_policy="lossguide",
            learning_rate=0.1,
            tree_method="hist",
            n_jobs=threads,
            enable_categorical=bool(categories),
            feature_types=["c" if column in categories else "q" for column in range(columns)],
        )
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=steps, num_leaves=leaves, n_jobs=threads, verbose=-1)


def forest_of(kind: str, contestant: str, rows: int, columns: int, trees: int, threads: int) -> Any:
    """Return a forest that is not fitted. Raises ModuleNotFoundError, and KeyError if a contestant has none."""
    name = "ExtraTrees" if kind.startswith("extra") else "RandomForest"
    name += "Regressor" if kind.endswith("numbers") else "Classifier"
    if contestant == "ronde":
        from ronde import ml

        return getattr(ml, name)(trees)
    if contestant == "scikit-learn":
        from sklearn import ensemble

        return getattr(ensemble, name)(trees, n_jobs=threads)
    if contestant != "lightgbm":
        raise KeyError(contestant)
    import lightgbm

    drawn = 1.0 if kind.endswith("numbers") else max(1, int(math.sqrt(columns))) / columns
    return getattr(lightgbm, "LGBMRegressor" if kind.endswith("numbers") else "LGBMClassifier")(
        boosting_type="rf",
        n_estimators=trees,
        num_leaves=min(131072, max(2, rows // 20)),
        subsample=0.632,
        subsample_freq=1,
        colsample_bynode=drawn,
        extra_trees=kind.startswith("extra"),
        n_jobs=threads,
        verbose=-1,
    )


def tree_of_depth(kind: str, contestant: str, depth: int, trees: int, threads: int, columns: int) -> Any:
    """Return a classifier that is not fitted, whose trees have this depth at most. Raises ModuleNotFoundError."""
    if contestant == "spark":
        from spark_trees import SparkTrees

        return SparkTrees(kind == "boosting", trees, depth, threads)
    from ronde import ml

    if kind == "boosting":
        return ml.GradientBoostingClassifier(
            learning_rate=0.2,  # as good as 0.1 of Spark, whose loss has steeper gradients
            max_iter=trees,
            max_leaf_nodes=None,
            max_depth=depth,
            min_samples_leaf=1,
            early_stopping=False,
        )
    # Spark rounds the square root up.
    return ml.RandomForestClassifier(trees, max_depth=depth, max_features=math.ceil(math.sqrt(columns)))


def measure(contestant: str, size: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the measures of one fit in this process."""
    kind, steps, threads = options.kind, options.steps, options.threads
    rows, columns, *leaves = map(int, size.split("x"))
    are_numbers = kind.endswith("numbers")
    data, y = make_rows(rows + TEST_ROWS, columns, options.data, are_numbers)
    categories = list(range(0, columns, 2)) if options.data == "categorical" else []
    if contestant == "scikit-learn" and options.data == "sparse":
        data = data.toarray()
    if options.spark:
        model, other = (
            tree_of_depth(kind, contestant, leaves[0], trees, threads, columns) for trees in (steps, 2)
        )
    elif kind == "boosting":
        model, other = (
            model_of(contestant, most, trees, threads, columns, categories)
            for most, trees in ((leaves[0], steps), (4, 1))
        )
    else:
        model, other = (forest_of(kind, contestant, rows, columns, trees, threads) for trees in (steps, 1))
    named = {"categorical_feature": categories} if contestant == "lightgbm" and categories else {}
    few = rows if contestant == "spark" else 500
    other.fit(data[:few], y[:few], **named)  # loads libraries, and has a JVM compile its code
    if contestant == "spark":
        model.load(data[:rows], y[:rows])
    began_cpu_s, began_s = cpu_s(), time.perf_counter()
    model.fit(data[:rows], y[:rows], **named)
    fitted_cpu_s, fitted_s = cpu_s(), time.perf_counter()
    predicted = model.predict(data[rows:]) if are_numbers else model.predict_proba(data[rows:])[:, 1]
    times = (fitted_cpu_s - began_cpu_s, fitted_s - began_s, cpu_s() - fitted_cpu_s)
    return {**dict(zip(TIMES, times)), **qualities(y[rows:], predicted, are_numbers)}


def qualities(y: Array, predicted: Array, are_numbers: bool) -> dict[str, float]:
    """Return how good predicted numbers, or probabilities of the second class, are."""
    from sklearn.metrics import log_loss, r2_score, roc_auc_score, root_mean_squared_error

    if are_numbers:
        return {"r2": float(r2_score(y, predicted)), "rmse": float(root_mean_squared_error(y, predicted))}
    return {"auc": float(roc_auc_score(y, predicted)), "log_loss": float(log_loss(y, predicted))}


def measure_apart(
    contestant: str, kind: str, size: str, options: argparse.Namespace
) -> dict[str, float] | None:
    """Return the measures of a fit in another process; None: the contestant is not installed, or has no such fit."""
    arguments = ["--one", contestant, "--kind", kind, "--sizes", size, "--steps", str(options.steps)]
    arguments += ["--data", options.data, *(["--spark"] if options.spark else [])]
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--threads", str(options.threads)],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
        check=False,
        timeout=options.timeout_s,
    )
    is_absent = "ModuleNotFoundError" in done.stderr or f"KeyError: '{contestant}'" in done.stderr
    if done.returncode and not is_absent:
        raise RuntimeError(f"the fit of {contestant} failed:\n{done.stderr}")
    return None if done.returncode else dict(json.loads(done.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Print a table for each kind and size, and return its rows."""
    records = []
    for kind, size in itertools.product(kinds, options.sizes):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in options.contestants}
        for _ in range(options.rounds):
            for name in options.contestants:
                if (result := measure_apart(name, kind, size, options)) is not None:
                    found[name].append(result)
        measures = [*TIMES, *(("r2", "rmse") if kind.endswith("numbers") else ("auc", "log_loss"))]
        print(f"\n{kind}: {size} (rows x columns x leaves), {options.data}, {options.steps} trees, ", end="")
        print(f"{options.threads} threads")
        print(f"{'':14}" + "".join(f"{name:>15}" for name in measures))
        for name, results in found.items():
            if not results:
                print(f"{name:14}  not installed, or has no such fit")
                continue
            medians = {key: statistics.median(each[key] for each in results) for key in measures}
            print(f"{name:14}" + "".join(f"{medians[key]:15.4g}" for key in measures), flush=True)
            records.append({"kind": kind, "size": size, "contestant": name, **medians})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--forests", nargs="*", choices=FORESTS, help="forests, all four or those named, not boosting"
    )
    parser.add_argument(
        "--sizes", nargs="+", help=f"({' '.join(SIZES)}; of forests {' '.join(SIZES_OF_FORESTS)})"
    )
    parser.add_argument("--data", choices=FORMS, default=FORMS[0])
    parser.add_argument("--spark", action="store_true", help="Ronde and Spark ML, with trees of equal depth")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=100, help="trees of a fit (100)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=1800, help="of a fit (1800)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=("boosting", *FORESTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
        print(json.dumps(measure(options.one, options.sizes[0], options)))
        return
    options.contestants = options.contestants or (("ronde", "spark") if options.spark else CONTESTANTS[:-1])
    are_forests = options.forests is not None
    options.sizes = options.sizes or (SIZES_OF_FORESTS if are_forests else SIZES)
    records = compare(options, (options.forests or FORESTS) if are_forests else ["boosting"])
    if options.csv:
        with options.csv.open("w", newline="") as file:
            qualities_of_all = ("auc", "log_loss", "r2", "rmse")
            writer = csv.DictWriter(file, ["kind", "size", "contestant", *TIMES, *qualities_of_all])
            writer.writeheader()
            writer.writerows(records)


if __name__ == "__main__":
    main()
