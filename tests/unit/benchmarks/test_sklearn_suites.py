"""How results of scikit-learn's tests are counted; no scikit-learn needed."""

from __future__ import annotations

import pytest
from sklearn_suites import SuiteResult, print_counts


def test_outcomes_are_counted_by_suite(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        SuiteResult("forests", "a", "pass", 2, 0.1, ""),
        SuiteResult("forests", "b", "pass", 0, 0.1, ""),
        SuiteResult("forests", "c", "fail", 1, 0.1, "no"),
        SuiteResult("topics", "d", "skip", 0, 0.1, "no pandas"),
    ]
    print_counts(results)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        ["suite", "pass", "fail", "skip", "unused"],
        ["forests", "2", "1", "0", "1"],
        ["topics", "0", "0", "1", "0"],
    ]
