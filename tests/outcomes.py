"""Which tests ran and which were skipped, over several runs of pytest with different packages.

With `--outcomes FILE` each run adds to FILE. `python -m tests.outcomes FILE` prints what was skipped in all of them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

RAN, SKIPPED = "ran", "skipped"


class Outcomes:
    """Adds a line to a file for each test, or file of tests, that ran or was skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(SKIPPED, report)
        elif report.when == "call":
            self._add(RAN, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._add(SKIPPED, report)

    def _add(self, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        with self._file.open("a") as file:
            file.write("\t".join([outcome, report.nodeid, " ".join(reason.split())]) + "\n")


def never_ran(lines: Iterable[str]) -> dict[str, list[str]]:
    """Return the tests that were skipped in every run, by the reason of the last one.

    A file that was skipped as a whole counts as a test. It has run once one of its tests has.
    """
    ran, skipped = set(), {}
    for line in lines:
        outcome, name, reason = line.rstrip("\n").split("\t")
        if outcome == RAN:
            ran |= {name, name.partition("::")[0]}
        else:
            skipped[name] = reason
    by_reason = defaultdict(list)
    for name in sorted(skipped.keys() - ran):
        by_reason[skipped[name]].append(name)
    return dict(by_reason)


if __name__ == "__main__":
    for reason, names in never_ran(Path(sys.argv[1]).read_text().splitlines()).items():
        print(f"{reason.removeprefix('Skipped: ')}: {len(names)}", *names[:8], sep="\n  ")
        if len(names) > 8:
            print("  ...")
