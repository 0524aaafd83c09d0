"""Runs scikit-learn's own tests with Ronde's estimators in the place of scikit-learn's, and counts what passes.

    python benchmarks/sklearn_suites.py --csv ronde.csv
    python benchmarks/sklearn_suites.py --original --csv original.csv
    python benchmarks/sklearn_suites.py sklearn.ensemble.tests.test_forest -k importances
    python benchmarks/sklearn_suites.py ~/scikit-learn/sklearn/cluster/tests/test_k_means.py

A suite is a module of the installed scikit-learn, or the path of a file of tests that fits the installed version.
Before its import, the classes of `REPLACED` are replaced in all of scikit-learn's modules. It needs pytest and
pytest-timeout. A test that is not over after `--time-limit` seconds has failed.

Each suite runs in one process. `unused` counts tests that passed without an estimator of Ronde: they test functions,
or estimators that Ronde does not have.
"""

from __future__ import annotations

import argparse
import collections
import csv
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

REPLACED = {  # class of scikit-learn: that of ronde.ml
    "ElasticNet": "ElasticNet",
    "ExtraTreesClassifier": "ExtraTreesClassifier",
    "ExtraTreesRegressor": "ExtraTreesRegressor",
    "HistGradientBoostingClassifier": "GradientBoostingClassifier",
    "HistGradientBoostingRegressor": "GradientBoostingRegressor",
    "KMeans": "KMeans",
    "Lasso": "Lasso",
    "LatentDirichletAllocation": "LatentDirichletAllocation",
    "LinearRegression": "LinearRegression",
    "LinearSVC": "LinearSVC",
    "LogisticRegression": "LogisticRegression",
    "MiniBatchKMeans": "MiniBatchKMeans",
    "Perceptron": "Perceptron",
    "RandomForestClassifier": "RandomForestClassifier",
    "RandomForestRegressor": "RandomForestRegressor",
    "Ridge": "Ridge",
}
HOMES = [
    "sklearn.cluster",
    "sklearn.decomposition",
    "sklearn.ensemble",
    "sklearn.linear_model",
    "sklearn.svm",
]
SUITES = [
    "sklearn.ensemble._hist_gradient_boosting.tests.test_gradient_boosting",
    "sklearn.ensemble._hist_gradient_boosting.tests.test_monotonic_constraints",
    "sklearn.ensemble._hist_gradient_boosting.tests.test_warm_start",
    "sklearn.ensemble.tests.test_forest",
    "sklearn.decomposition.tests.test_online_lda",
    "sklearn.cluster.tests.test_k_means",
    "sklearn.linear_model.tests.test_base",
    "sklearn.linear_model.tests.test_coordinate_descent",
    "sklearn.linear_model.tests.test_logistic",
    "sklearn.linear_model.tests.test_perceptron",
    "sklearn.linear_model.tests.test_ridge",
    "sklearn.svm.tests.test_svm",
    "sklearn.inspection.tests.test_partial_dependence",
    "sklearn.inspection.tests.test_permutation_importance",
    "sklearn.tests.test_calibration",
]
Originals = list[tuple[Any, str, Any]]
OUTCOMES = ["pass", "fail", "skip"]
PARTS_S = 3600  # of one suite: only against hanging


@dataclass(frozen=True)
class SuiteResult:
    """One test: the columns of the CSV file."""

    suite: str
    test: str
    outcome: str  # one of OUTCOMES
    estimators: int  # of Ronde, that the test made
    seconds: float
    reason: str


class Recorder:
    """A plugin of pytest that writes a line of JSON for each test."""

    def __init__(self, suite: str, path: Path) -> None:
        self._suite, self._path = suite, path
        self._made, self._failed = 0, False
        self._originals: Originals = []

    def replace(self) -> None:
        """Replace scikit-learn's classes until the tests are imported."""
        self._originals = replace_estimators()
        self.count_estimators()

    def pytest_collection_finish(self) -> None:
        """Give modules their own classes back, which call them by name, as in `super(LogisticRegression, self)`."""
        for module, name, original in self._originals:
            setattr(module, name, original)

    def count_estimators(self) -> None:
        """Count from now on how often an estimator of Ronde is made."""
        from ronde.ml.base import DistributedEstimator

        recorder = self

        def make(cls: type, *args: Any, **named: Any) -> Any:
            recorder._made += 1
            return object.__new__(cls)

        DistributedEstimator.__new__ = staticmethod(make)  # type: ignore[method-assign]

    def pytest_runtest_logstart(self) -> None:
        self._made, self._failed = 0, False

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            if report.outcome == "failed" and self._failed:  # the call, and now its teardown
                return
            self._failed = report.outcome == "failed"
            self._write(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(report)

    def _write(self, report: Any) -> None:
        outcome = {"passed": "pass", "failed": "fail", "skipped": "skip"}[report.outcome]
        test = report.nodeid.rpartition("::")[2]
        reason = "" if outcome == "pass" else reason_of(report.longrepr)
        result = SuiteResult(
            self._suite, test, outcome, self._made, round(getattr(report, "duration", 0.0), 2), reason
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def reason_of(representation: Any) -> str:
    """Return the last line that says why a test failed or was skipped."""
    if isinstance(representation, tuple):
        return str(representation[2])
    crash = getattr(representation, "reprcrash", None)
    return str(crash.message if crash else representation).strip().replace("\n", " ")[:300]


def replace_estimators() -> Originals:
    """Replace the classes in all modules of scikit-learn; return the modules that define them, names and classes."""
    import sklearn

    import ronde.ml

    homes = [importlib.import_module(name) for name in HOMES]
    for module in pkgutil.walk_packages(sklearn.__path__, "sklearn."):
        if ".tests" not in module.name and not module.name.startswith(
            ("sklearn.externals", "sklearn._build")
        ):
            try:
                importlib.import_module(module.name)
            except ImportError:  # of a package that is not installed
                continue
    defined: Originals = []
    for theirs, ours in REPLACED.items():
        original = next(getattr(home, theirs) for home in homes if hasattr(home, theirs))
        defined.append((sys.modules[original.__module__], theirs, original))
        for name, loaded in list(sys.modules.items()):
            if name.startswith("sklearn.") and getattr(loaded, theirs, None) is original:
                setattr(loaded, theirs, getattr(ronde.ml, ours))
    return defined


def run_in_this_process(suite: str, path: Path, original: bool, words: list[str]) -> int:
    """Run the tests of one suite; write their results into a file."""
    import pytest

    recorder = Recorder(suite, path)
    if not original:
        recorder.replace()
    where = [suite] if suite.endswith(".py") else ["--pyargs", suite]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore",
        "--rootdir=/",
        "-c",
        "/dev/null",
    ]
    return int(pytest.main([*options, *where, *words], plugins=[recorder]))


def log_of(suite: str, folder: Path | None) -> Path:
    """Return where the output of a suite goes."""
    return folder / f"{Path(suite).name}.log" if folder else Path(os.devnull)


def run_suite(suite: str, options: argparse.Namespace) -> list[SuiteResult]:
    """Run the tests of one suite in a process of their own; return the results."""
    with tempfile.TemporaryDirectory() as folder, open(log_of(suite, options.logs), "wb") as log:
        path = Path(folder, "results")
        path.touch()
        place = str(Path(suite).absolute()) if suite.endswith(".py") else suite
        words = [
            sys.executable,
            str(Path(__file__).absolute()),
            place,
            "--results",
            str(path),
            "-k",
            options.k,
        ]
        words += ["--time-limit", str(options.time_limit)] + ["--original"] * options.original
        status = subprocess.run(
            words,
            cwd=folder,  # where no conftest.py is
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=PARTS_S,
            check=False,
        )
        results = [SuiteResult(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    if status.returncode not in (0, 1, 5):  # pytest: tests have failed, there is none
        lost = f"lost: the suite's process ended with status {status.returncode}; see --logs"
        results.append(SuiteResult(suite, "", "fail", 0, 0.0, lost))
    for result in results:
        if result.outcome == "fail":
            print(
                f"{result.outcome}  {result.seconds:6.1f} s  {result.test}  {result.reason}"[:240], flush=True
            )
    return results


def print_counts(results: Iterable[SuiteResult]) -> None:
    """Print for each suite how many tests passed, failed, were skipped, and passed without an estimator of Ronde."""
    of_suite: dict[str, list[SuiteResult]] = {}
    for result in results:
        of_suite.setdefault(result.suite, []).append(result)
    width = max([len("suite"), *map(len, of_suite)])
    print(f"\n{'suite':{width}}" + "".join(f"{head:>8}" for head in [*OUTCOMES, "unused"]))
    for suite, found in of_suite.items():
        outcomes = collections.Counter(result.outcome for result in found)
        unused = sum(result.outcome == "pass" and not result.estimators for result in found)
        print(f"{suite:{width}}" + "".join(f"{outcomes[each]:8}" for each in OUTCOMES) + f"{unused:8}")


def write_results(path: Path, results: Iterable[SuiteResult]) -> None:
    """Write a CSV file with a line for each test."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SuiteResult)])
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", default=SUITES, help="modules and files (default: see SUITES)")
    parser.add_argument("--original", action="store_true", help="replace nothing, for a comparison")
    parser.add_argument("-k", default="", metavar="PART", help="only tests whose names contain this")
    parser.add_argument("--time-limit", type=int, default=60, metavar="S", help="of a test (default: 60 s)")
    parser.add_argument("--csv", type=Path, help="write one line for each test into this file")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the output of each suite here")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # of the process of one suite
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.results:
        words = [f"--timeout={options.time_limit}"] + (["-k", options.k] if options.k else [])
        sys.exit(run_in_this_process(options.suites[0], options.results, options.original, words))
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    results: list[SuiteResult] = []
    for suite in options.suites:
        results += run_suite(suite, options)
        if options.csv:  # after each suite: the next one may take long
            write_results(options.csv, results)
    print_counts(results)


if __name__ == "__main__":
    main()
