"""Stalls between two hosts with two ranks each: one rank reports, whichever host the missing one is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.ranks.engine import test_stall as programs

from ronde.testing.hosts import Hosts


@pytest.mark.parametrize(("how", "stuck"), [("sleeps", 0), ("holds the interpreter", 3)])
def test_a_report_names_the_rank_on_the_other_host(how: str, stuck: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with Hosts(2, ranks_per_host=2) as two:
        told = two.run(programs.wait_for_a_stuck_rank, how, stuck, "cached", str(tmp_path / "pipe"))
    (report,) = [text for texts in told for text in texts]
    assert "'cached' (allreduce)" in report
    assert f"not by rank {stuck}" in report
    assert any(line in report for line in programs.lines_of(how)), report


def test_a_report_names_who_does_not_come_to_a_round(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    how = "holds the interpreter"
    with Hosts(2, ranks_per_host=2) as two:
        told = two.run(programs.wait_for_a_stuck_rank, how, 3, "early", str(tmp_path / "pipe"))
    (report,) = [text for texts in told for text in texts]
    assert "'early' (allreduce)" in report
    assert f"rank 3 on {os.uname().nodename} holds up the engine" in report, report
    assert any(line in report for line in programs.lines_of(how)), report
