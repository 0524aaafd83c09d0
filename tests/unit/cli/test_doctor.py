"""`ronde doctor` as a command."""

from __future__ import annotations

import json

import pytest

from ronde.cli import main


def test_prints_a_line_for_each_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:2] in ("  ", "! ") for line in lines)
    subjects = [line[2:].split(":")[0] for line in lines if line[2] != " "]
    assert subjects[:5] == ["cores", "other programs", "memory", "file descriptors", "processes"]


def test_prints_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"subject", "text", "remedy"} == set(findings[0])


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsn"]) == 2
    assert "--json" in capsys.readouterr().err
