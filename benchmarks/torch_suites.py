"""Runs PyTorch's own tests of torch.distributed with a backend, and counts what passes, fails and is skipped.

    python benchmarks/torch_suites.py --backend gloo --csv gloo.csv
    python benchmarks/torch_suites.py --backend ronde --compare gloo.csv
    python benchmarks/torch_suites.py --backend ronde distributed -k all_reduce
    python benchmarks/torch_suites.py --backend ronde ~/pytorch/test/distributed/test_device_mesh.py

The suite `distributed` (the default) comes with the installed PyTorch. All others are files of PyTorch's folder
`test/`, which its wheels lack: give the paths of files in a copy that fits the installed version. benchmarks/README.md
tells how tests are counted and which files can name a backend.

Each suite runs in one process, whose copies (forked after the imports) are the ranks. A test that is not over after
`--time-limit` seconds has failed; the suite then goes on in a new process with the next test.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch_suite_process import Suite

BUILT_IN = "distributed"
OUTCOMES = ["pass", "fail", "skip"]
START_S = 120  # for the imports of a suite's process
GRACE_S = 30  # beyond the time limit: the suite's process reports its slow tests


@dataclass(frozen=True)
class SuiteResult:
    """One test: the columns of the CSV file."""

    suite: str
    test: str
    outcome: str  # one of OUTCOMES
    groups: int  # process groups of the backend that all ranks together made
    calls: int  # calls of torch.distributed's functions, and DDP models, of all ranks together
    seconds: float
    reason: str


class SuiteProcess:
    """A process that runs the tests of one suite and reports each as a line of JSON."""

    def __init__(self, suite: Suite, log: Path | None) -> None:
        reports, theirs = os.pipe()
        words = [sys.executable, str(Path(__file__).with_name("torch_suite_process.py")), str(theirs)]
        environment = os.environ | {
            "WORLD_SIZE": str(suite.ranks),
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(suite.limit_s),
        }
        output = log.open("ab") if log else None
        self._process = subprocess.Popen(
            words + [json.dumps(asdict(suite))],
            env=environment,
            pass_fds=[theirs],
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=output or subprocess.DEVNULL,
            start_new_session=True,
        )
        if output:
            output.close()
        os.close(theirs)
        self._reports = reports
        self._unread = b""

    def next_report(self, limit_s: float) -> dict[str, object] | None:
        """Return the next line, or None at the end of them.

        Raises:
            TimeoutError: there is none within `limit_s` seconds.
        """
        end = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._reports], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise TimeoutError
            got = os.read(self._reports, 1 << 16)
            if not got:
                return None
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        report: dict[str, object] = json.loads(line)
        return report

    def end(self) -> int:
        """End the process and its ranks; return its exit status, negative for a signal."""
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(self._reports)
        return self._process.wait()


def run_suite(suite: Suite, log: Path | None) -> list[SuiteResult]:
    """Run all tests of a suite, in as many processes as it takes."""
    results: list[SuiteResult] = []
    while True:
        again = Suite(**asdict(suite) | {"done": [*suite.done, *(result.test for result in results)]})
        found = run_process(again, log)
        results += found
        if not (found and found[-1].test and found[-1].reason.startswith("lost: ")):
            return results


def run_process(suite: Suite, log: Path | None) -> list[SuiteResult]:
    """Run tests in one process, until they are done or it is lost: then the last result's reason says so."""
    process = SuiteProcess(suite, log)
    results: list[SuiteResult] = []
    running, limit_s = "", float(START_S)
    lost = ""
    began = time.monotonic()
    try:
        while (report := process.next_report(limit_s)) is not None:
            if report["event"] == "begin":
                running, limit_s, began = str(report["test"]), suite.limit_s + GRACE_S, time.monotonic()
            elif report["event"] == "end":
                results.append(printed(SuiteResult(suite.name, **report["result"])))  # type: ignore[arg-type]
                running = ""
            else:  # no tests at all
                results.append(printed(SuiteResult(suite.name, "", "skip", 0, 0, 0.0, str(report["reason"]))))
    except TimeoutError:
        lost = f"lost: not over after {limit_s:.0f} s"
    finally:
        status = process.end()
    if not lost and status != 0:
        lost = f"lost: the suite's process ended with status {status}"
    if lost and running:
        seconds = round(time.monotonic() - began, 1)
        results.append(printed(SuiteResult(suite.name, running, "fail", 0, 0, seconds, lost)))
    elif lost:
        results.append(
            printed(SuiteResult(suite.name, "", "fail", 0, 0, 0.0, f"{lost}, not in a test; see --logs"))
        )
    return results


def printed(result: SuiteResult) -> SuiteResult:
    """Print the line of a result and return it."""
    print(f"{result.outcome:4}  {result.seconds:6.1f} s  {result.test}  {result.reason}"[:200], flush=True)
    return result


def print_counts(results: Iterable[SuiteResult]) -> None:
    """Print what passed, failed and was skipped in each suite, and how often for which reason."""
    of_suite: dict[str, list[SuiteResult]] = {}
    for result in results:
        of_suite.setdefault(result.suite, []).append(result)
    width = max([len("suite"), *map(len, of_suite)])
    heads = "".join(f"{head:>9}" for head in [*OUTCOMES, "unused", "no call"])
    print(f"\n{'suite':{width}}{heads}")
    for suite, found in of_suite.items():
        passed = [result for result in found if result.outcome == "pass"]
        counts = [sum(result.outcome == outcome for result in found) for outcome in OUTCOMES]
        counts += [sum(not result.groups for result in passed)]
        counts += [sum(bool(result.groups) and not result.calls for result in passed)]
        print(f"{suite:{width}}" + "".join(f"{count:9}" for count in counts))
    print("unused, no call: tests that passed without a group of the backend; with one, but without a call")
    for suite, found in of_suite.items():
        reasons = collections.Counter((result.outcome, result.reason) for result in found if result.reason)
        for (outcome, reason), count in sorted(reasons.items(), key=lambda item: -item[1]):
            print(f"{suite}: {outcome} {count:4} x {reason}"[:200])


def print_comparison(results: Iterable[SuiteResult], others: Iterable[SuiteResult]) -> None:
    """Print the tests that pass in `others` and do not in `results`."""
    here = {(result.suite, result.test): result for result in results}
    passed = [(other.suite, other.test) for other in others if other.outcome == "pass"]
    missing = [here[key] for key in passed if key in here and here[key].outcome != "pass"]
    print(f"\n{len(missing)} tests pass there and not here:")
    for result in missing:
        print(f"  {result.suite} {result.test}: {result.outcome}: {result.reason}")


def write_results(path: Path, results: Iterable[SuiteResult]) -> None:
    """Write a CSV file with a line for each test."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SuiteResult)])
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)


def read_results(path: Path) -> list[SuiteResult]:
    """Read what `write_results` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        SuiteResult(
            row["suite"],
            row["test"],
            row["outcome"],
            int(row["groups"]),
            int(row["calls"]),
            float(row["seconds"]),
            row["reason"],
        )
        for row in rows
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "suites", nargs="*", default=[BUILT_IN], help=f"`{BUILT_IN}` and files (default: {BUILT_IN})"
    )
    parser.add_argument("--backend", default="ronde", help="its name for torch.distributed (default: ronde)")
    parser.add_argument(
        "--register",
        nargs="*",
        metavar="MODULE",
        help="what to import first (ronde: ronde.torch.distributed)",
    )
    parser.add_argument(
        "--counts-as",
        nargs="+",
        default=["gloo", "mpi"],
        metavar="BACKEND",
        help="backends of PyTorch whose CPU tests the suite `distributed` runs (default: gloo mpi)",
    )
    parser.add_argument(
        "--no-events",
        action="store_true",
        help="do not ask for events such as `ronde:all_reduce` in profiles",
    )
    parser.add_argument("--ranks", type=int, default=4, help="world size of `distributed` (default: 4)")
    parser.add_argument("-k", default="", metavar="PART", help="only tests whose names contain this")
    parser.add_argument("--time-limit", type=int, default=60, metavar="S", help="of a test (default: 60 s)")
    parser.add_argument(
        "--on-cpu", action="store_true", help="let the tests of files use the CPU in the place of GPUs"
    )
    parser.add_argument("--csv", type=Path, help="write one line for each test into this file")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the output of each suite here")
    parser.add_argument("--compare", type=Path, metavar="CSV", help="results of another backend")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    default = ["ronde.torch.distributed"] if options.backend == "ronde" else []
    results: list[SuiteResult] = []
    for name in options.suites:
        suite = Suite(
            name=BUILT_IN if name == BUILT_IN else Path(name).stem,
            path="" if name == BUILT_IN else str(Path(name).absolute()),
            backend=options.backend,
            register=default if options.register is None else options.register,
            counts_as=options.counts_as,
            events=not options.no_events,
            ranks=options.ranks,
            part=options.k,
            limit_s=options.time_limit,
            on_cpu=options.on_cpu,
            done=[],
        )
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
        results += run_suite(suite, options.logs / f"{suite.name}.log" if options.logs else None)
        if options.csv:  # after each suite: the next one may take long
            write_results(options.csv, results)
    print_counts(results)
    if options.compare:
        print_comparison(results, read_results(options.compare))


if __name__ == "__main__":
    main()
