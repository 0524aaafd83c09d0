"""`ronde bench` as a command: which options are its own, and what it refuses."""

from __future__ import annotations

import pytest

from ronde.cli import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.py"], "ronde bench takes options only, not a program"),
        (["--seconds", "soon"], "a number of seconds from 0.1 to 600"),
        (["--largest", "1KiB"], "a size from 64KiB to 1GiB"),
        (["--jsn"], "unknown option --jsn"),
    ],
)
def test_mistakes_are_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ranks", "rest"),
    [
        ([], "2", "--seconds 10.0 --largest 67108864"),
        (["--json", "-n", "3", "--seconds=0.5"], "3", "--seconds 0.5 --largest 67108864 --json"),
    ],
)
def test_starts_ranks_by_ronde_run(
    words: list[str], ranks: str, rest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert f"ronde.bench {rest}\n" in plan
    assert f"{ranks} workers" in plan
