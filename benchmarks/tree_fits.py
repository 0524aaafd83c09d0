"""Fits of gradient boosting: Ronde's, scikit-learn's, XGBoost's and LightGBM's, with the same rows, trees and leaves.

    python benchmarks/tree_fits.py --sizes 1000x20x31 100000x50x31 1000000x28x255 --threads 2

Each fit has a process of its own, and contestants take turns. A size is rows x columns x leaves. The table has the CPU
time and the time of a fit, the time to predict 20,000 rows, and how good the probabilities of these are. With a busy
machine, compare CPU times with one thread: those of threads that wait for each other grow with the load.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTESTANTS = ("ronde", "scikit-learn", "xgboost", "lightgbm")
TEST_ROWS = 20_000
MEASURES = ("cpu_s", "wall_s", "predict_cpu_s", "auc", "log_loss")

Array = NDArray[Any]


def make_rows(rows: int, columns: int) -> tuple[Array, Array]:
    """Return rows of numbers, float32, and two classes that depend on eight of the columns."""
    random = np.random.default_rng(0)
    data = random.normal(size=(rows, columns)).astype(np.float32)
    score = data[:, 0] * data[:, 1] + np.sin(2 * data[:, 2]) + data[:, 3] ** 2 / 2 - np.abs(data[:, 4])
    score += data[:, 5] * data[:, 6] * data[:, 7] / 2
    return data, (score + 0.7 * random.logistic(size=rows) > score.mean()).astype(int)


def model_of(contestant: str, leaves: int, steps: int, threads: int) -> Any:
    """Return a classifier that is not fitted. Raises ModuleNotFoundError."""
    if contestant == "ronde":
        from ronde.ml import GradientBoostingClassifier

        return GradientBoostingClassifier(max_iter=steps, max_leaf_nodes=leaves, early_stopping=False)
    if contestant == "scikit-learn":
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(max_iter=steps, max_leaf_nodes=leaves, early_stopping=False)
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
        )
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=steps, num_leaves=leaves, n_jobs=threads, verbose=-1)


def measure(contestant: str, size: str, steps: int, threads: int) -> dict[str, float]:
    """Return the measures of one fit in this process."""
    from sklearn.metrics import log_loss, roc_auc_score

    rows, columns, leaves = map(int, size.split("x"))
    data, y = make_rows(rows + TEST_ROWS, columns)
    model = model_of(contestant, leaves, steps, threads)
    model_of(contestant, 4, 1, threads).fit(data[:500], y[:500])  # loads libraries
    began_cpu_s, began_s = cpu_s(), time.perf_counter()
    model.fit(data[:rows], y[:rows])
    fitted_cpu_s, fitted_s = cpu_s(), time.perf_counter()
    probabilities = model.predict_proba(data[rows:])[:, 1]
    return {
        "cpu_s": fitted_cpu_s - began_cpu_s,
        "wall_s": fitted_s - began_s,
        "predict_cpu_s": cpu_s() - fitted_cpu_s,
        "auc": float(roc_auc_score(y[rows:], probabilities)),
        "log_loss": float(log_loss(y[rows:], probabilities)),
    }


def cpu_s() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_apart(contestant: str, size: str, options: argparse.Namespace) -> dict[str, float] | None:
    """Return the measures of a fit in a process of its own; None: the contestant is not installed."""
    arguments = ["--one", contestant, "--sizes", size, "--steps", str(options.steps)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--threads", str(options.threads)],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
        check=False,
        timeout=options.timeout_s,
    )
    if done.returncode and "ModuleNotFoundError" not in done.stderr:
        raise RuntimeError(f"the fit of {contestant} failed:\n{done.stderr}")
    return None if done.returncode else dict(json.loads(done.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table for each size, and return its rows."""
    records = []
    for size in options.sizes:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in options.contestants}
        for _ in range(options.rounds):
            for name in options.contestants:
                if (result := measure_apart(name, size, options)) is not None:
                    found[name].append(result)
        print(f"\n{size} (rows x columns x leaves), {options.steps} trees, {options.threads} threads")
        print(f"{'':14}" + "".join(f"{name:>15}" for name in MEASURES))
        for name, results in found.items():
            if not results:
                print(f"{name:14}  not installed")
                continue
            medians = {key: statistics.median(each[key] for each in results) for key in MEASURES}
            print(f"{name:14}" + "".join(f"{medians[key]:15.4g}" for key in MEASURES), flush=True)
            records.append({"size": size, "contestant": name, **medians})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["1000x20x31", "100000x50x31", "1000000x28x255"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=100, help="trees of a fit (100)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=1800, help="of a fit (1800)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
        print(json.dumps(measure(options.one, options.sizes[0], options.steps, options.threads)))
        return
    records = compare(options)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["size", "contestant", *MEASURES])
            writer.writeheader()
            writer.writerows(records)


if __name__ == "__main__":
    main()
