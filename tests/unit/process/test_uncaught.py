"""Error files: written by workers and launchers, and readable whatever their content."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import ronde
from ronde.process.exceptions import hand_up, read_error_file
from ronde.process.uncaught import ErrorHandler
from ronde.rendezvous.membership import Failure


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


def test_an_exception_that_cannot_say_what_it_is_stays_the_cause(error_file: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    @ronde.record
    def fail() -> None:
        raise MuteError

    with pytest.raises(MuteError):
        fail()
    report = read_error_file(str(error_file))
    assert report is not None
    assert report.message == "MuteError, whose text cannot be had: ValueError"


@pytest.mark.parametrize("place", [None, ""])
def test_without_a_launcher_exceptions_just_pass(monkeypatch: pytest.MonkeyPatch, place: str | None) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if place is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", place)
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)


def test_a_custom_handler() -> None:
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


FAILURE = Failure(1, 1, "here", 7, 3, "rank 1 failed", "its last words")
TOLD = "rank 1 failed on here"


def test_what_is_handed_up_is_never_there_by_half(tmp_path: Path) -> None:
    path = tmp_path / "reply.json"
    path.write_text("what was there")
    with path.open() as before:
        hand_up(str(path), FAILURE)
        assert before.read() == "what was there"  # another file has taken its place
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == (TOLD, 3)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_handed_up_goes_where_no_other_file_can_take_the_place(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(file)
    hand_up(str(link), FAILURE)
    assert link.is_symlink()
    assert TOLD in file.read_text()
    reader, writer = os.pipe()
    hand_up(f"/dev/fd/{writer}", FAILURE)
    os.close(writer)
    with open(reader) as pipe:
        assert TOLD in pipe.read()
    with pytest.raises(IsADirectoryError):
        hand_up(str(tmp_path), FAILURE)


def test_a_draft_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Another user may create the link, in a directory that all can write, because the name can be guessed."""
    ours, path = tmp_path / "ours", tmp_path / "reply.json"
    ours.write_text("precious")
    path.with_name(f"reply.json.{os.getpid()}.new").symlink_to(ours)
    hand_up(str(path), FAILURE)
    assert ours.read_text() == "precious"
    assert TOLD in path.read_text()
    assert sorted(tmp_path.iterdir()) == [ours, path]


@pytest.mark.root
def test_the_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    ours, link = tmp_path / "ours", tmp_path / "reply.json"
    ours.write_text("precious")
    link.symlink_to(ours)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        hand_up(str(link), FAILURE)
    assert ours.read_text() == "precious"


@pytest.mark.root
def test_what_is_handed_up_reaches_a_file_that_a_container_has_mounted(tmp_path: Path) -> None:
    """As Kubernetes mounts its termination log."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.touch()
    inside.touch()
    subprocess.run(["mount", "--bind", str(outside), str(inside)], check=True)
    try:
        hand_up(str(inside), FAILURE)
    finally:
        subprocess.run(["umount", str(inside)], check=True)
    assert TOLD in outside.read_text()
    assert sorted(tmp_path.iterdir()) == [inside, outside]
