"""The text of an exception: the user's frames, of bounded length."""

from __future__ import annotations

import bdb
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.process.exceptions import exception_text, headline, read_error_file, shortened, write_error_file
from ronde.process.uncaught import record
from ronde.settings import resolve


def raised_by(raise_error: object) -> Exception:
    try:
        raise_error()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError


def set_wrongly() -> None:
    resolve({"RONDE_TCP_STREAMS": "many"})


def set_wrongly_and_wrap() -> None:
    try:
        set_wrongly()
    except UsageError as error:
        raise RuntimeError("cannot begin") from error


def test_the_frames_of_an_error_of_ronde_end_at_the_callers_line() -> None:
    text = exception_text(raised_by(set_wrongly))
    assert 'resolve({"RONDE_TCP_STREAMS": "many"})' in text
    assert "ronde/settings.py" not in text
    assert text.splitlines()[-1].startswith("ronde.errors.UsageError: RONDE_TCP_STREAMS='many'")


def test_so_do_those_of_an_error_that_led_to_another_one() -> None:
    text = exception_text(raised_by(set_wrongly_and_wrap))
    assert "ronde/settings.py" not in text
    assert text.splitlines()[-1] == "RuntimeError: cannot begin"


def test_a_mistake_inside_ronde_keeps_its_frames() -> None:
    text = exception_text(raised_by(lambda: resolve(3)))  # type: ignore[arg-type]
    assert "ronde/settings.py" in text


def test_frames_before_those_of_a_function_that_ronde_calls_are_left_out() -> None:
    @record
    def train() -> None:
        raise ValueError("no such column")

    error = raised_by(train)
    error.__traceback__ = (
        error.__traceback__ and error.__traceback__.tb_next
    )  # as in a worker, which begins in Ronde
    text = exception_text(error)
    assert "record_errors.py" not in text
    assert ", in train\n" in text


def test_an_error_that_no_user_called_has_its_place() -> None:
    error = raised_by(set_wrongly)
    error.__traceback__ = (
        error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    )
    lines = exception_text(error).splitlines()
    assert [line for line in lines if line.lstrip().startswith("File ")] == [lines[1]]
    assert "/ronde/" in lines[1]


@pytest.fixture
def at_level_debug() -> Iterator[None]:
    logger = logging.getLogger("ronde")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("at_level_debug")
def test_the_level_debug_keeps_all_frames() -> None:
    assert "ronde/settings.py" in exception_text(raised_by(set_wrongly))


def test_a_long_message_loses_its_middle_and_no_frame() -> None:
    def fail() -> None:
        raise ValueError("a" + "y" * 10_000_000 + "z")

    text = exception_text(raised_by(fail))
    assert len(text) < 10_000
    assert ", in fail\n" in text
    assert "ValueError: ay" in text
    assert text.endswith("yz\n")


def test_many_lines_stay_within_the_bound() -> None:
    error = ValueError("x")
    for _ in range(1000):
        error.add_note("n" * 1000)
    assert len(exception_text(error)) < 70_000


@pytest.mark.parametrize("size", [0, 1, 80, 100, 101, 1000])
def test_only_longer_texts_are_shortened(size: int) -> None:
    text = "".join(chr(97 + number % 26) for number in range(size))
    short = shortened(text, 100)
    if size <= 100:
        assert short == text
    else:
        head, note, tail = short.split(" ... ")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert f"({size - len(head) - len(tail):,} characters left out)" == note


def test_a_headline_is_the_first_line_of_the_message() -> None:
    assert headline(ValueError("one\ntwo")) == "ValueError: one"
    assert headline(UsageError("wrong")) == "ronde.errors.UsageError: wrong"
    assert headline(KeyError()) == "KeyError"
    assert headline(raised_by(lambda: compile("for", "f.py", "exec"))).startswith("SyntaxError: ")


def test_an_error_file_of_another_program_is_shortened(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nValueError: ' + "y" * 5_000_000
    message = {"message": "ValueError: " + "y" * 5_000_000, "extraInfo": {"py_callstack": text}}
    (tmp_path / "error.json").write_text(json.dumps({"message": message}))
    report = read_error_file(str(tmp_path / "error.json"))
    assert report
    assert report.message.startswith("ValueError: yyy")
    assert 'File "a.py", line 3, in f\n' in report.traceback
    assert len(report.message) + len(report.traceback) < 20_000


def test_leaving_the_debugger_is_one_sentence(tmp_path: Path) -> None:
    def leave() -> None:
        raise bdb.BdbQuit

    error = raised_by(leave)
    assert exception_text(error).startswith("BdbQuit: the debugger was left at File ")
    assert len(exception_text(error).splitlines()) == 1
    write_error_file(str(tmp_path / "error.json"), error)
    report = read_error_file(str(tmp_path / "error.json"))
    assert report
    assert (report.message.startswith("BdbQuit: the debugger was left"), report.traceback) == (True, "")
