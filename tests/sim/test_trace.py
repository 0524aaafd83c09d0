"""Compares the golden traces with what the machines do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sim.trace import FOLDER, main, run_trace


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_trace(path: Path) -> None:
    expected = path.read_text()
    assert run_trace(expected) == expected, "if that is right: python -m tests.sim.trace --rewrite"


def test_rewriting_replaces_the_output_and_keeps_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("# a remark\njob nodes=1\n\njoin a\nwait 1\n    an old line\n")
    assert main([str(path)]) == 1
    assert main(["--rewrite", str(path)]) == 0
    assert main([str(path)]) == 0
    lines = path.read_text().splitlines()
    assert lines[:5] == ["# a remark", "job nodes=1", "", "join a", "wait 1"]
    assert lines[-1] == "       0.0  a   starts workers of round 0 as node 0 of 1"
    assert capsys.readouterr().out.splitlines() == [f"{path} differs", f"{path} is new now"]
