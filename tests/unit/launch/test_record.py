"""Error files: who writes them, and that whatever is in them can be read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import ronde
from ronde.launch.record import ErrorHandler, read_error_file


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@ronde.record
def divide(a: int, b: int = 1) -> float:
    """Divide."""
    return a / b


def test_what_is_recorded_is_what_is_read(error_file: Path) -> None:
    before_ns = time.time_ns()
    with pytest.raises(ZeroDivisionError):
        divide(1, b=0)
    report = read_error_file(str(error_file))
    assert report is not None
    assert report.message == "ZeroDivisionError: division by zero"
    assert report.traceback.startswith("Traceback (most recent call last):\n")
    assert "return a / b" in report.traceback
    assert before_ns <= report.time_ns <= time.time_ns()
    info = json.loads(error_file.read_text())["message"]["extraInfo"]
    assert set(info) >= {"py_callstack", "timestamp"}
    assert info["timestamp"].isdecimal(), "as torch reads it"


def test_success_and_exits_are_not_recorded(error_file: Path) -> None:
    @ronde.record
    def leave() -> None:
        raise SystemExit(3)

    assert divide(6, 3) == 2
    assert (divide.__name__, divide.__doc__) == ("divide", "Divide.")
    with pytest.raises(SystemExit):
        leave()
    assert not error_file.exists()


@pytest.mark.parametrize("place", [None, ""])
def test_without_a_launcher_exceptions_just_pass(monkeypatch: pytest.MonkeyPatch, place: str | None) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if place is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", place)
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)


def test_a_handler_of_ones_own() -> None:
    told = []

    class Handler(ErrorHandler):
        def initialize(self) -> None:
            told.append("initialize")

        def record_exception(self, error: BaseException) -> None:
            told.append(str(error))

    @ronde.record(error_handler=Handler())
    def fail() -> None:
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        fail()
    assert told == ["initialize", "the cause"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"message": "a plain sentence", "timestamp": "1"}', "a plain sentence"),
        ('{"message": {"message": "E: x", "extraInfo": {"timestamp": "17"}}}', "E: x"),
        ('{"message": {"message": "E: x"}}', "E: x"),
        ("no JSON", "an error file that cannot be read"),
        ("[1]", "an error file that cannot be read"),
        ('{"message": {"extraInfo": 3}}', "an error file that cannot be read"),
        ("[" * 100_000, "an error file that cannot be read"),
    ],
)
def test_whatever_is_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    report = read_error_file(str(path))
    assert report is not None
    assert report.message == message
    assert report.time_ns == path.stat().st_mtime_ns, "torch's own seconds do not tell what came first"


def test_no_file_no_report(tmp_path: Path) -> None:
    assert read_error_file(str(tmp_path / "none")) is None
    (tmp_path / "empty").touch()
    assert read_error_file(str(tmp_path / "empty")) is None
