"""Lines of several workers on one stream."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import select
import termios
import tty
from pathlib import Path

import pytest

from ronde.launch.screen import (
    BACKLOG_BYTES,
    ERASE_TO_END,
    Digest,
    LineSplitter,
    LogView,
    OutputStream,
    Piece,
    Sink,
    Source,
    Tail,
    TerminalView,
    View,
    open_sinks,
    tail_of_file,
)
from ronde.process.disk import LogWriter

HANGING_S = 60
A = Source(0, "stdout", b"[0] ")
B = Source(1, "stdout", b"[1] ")
CLEAR = b"\r" + ERASE_TO_END


class Screen:
    """The rendering of the bytes of several sources by a view."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.splitters = {A: LineSplitter(16), B: LineSplitter(16)}
        self.shown = b""

    def says(self, source: Source, *chunks: bytes) -> bytes:
        shown = b""
        for chunk in chunks:
            splitter = self.splitters[source]
            pieces = splitter.feed(chunk)
            shown += self.view.render(source, pieces, splitter.unfinished_update)
        return shown

    def ends(self, source: Source) -> bytes:
        return self.view.render(source, self.splitters[source].finish(), b"")


@pytest.fixture(params=[LogView, TerminalView])
def screen(request: pytest.FixtureRequest) -> Screen:
    return Screen(request.param())


@pytest.fixture
def log() -> Screen:
    return Screen(LogView())


@pytest.fixture
def terminal() -> Screen:
    return Screen(TerminalView())


def test_every_line_has_its_prefix(screen: Screen) -> None:
    assert screen.says(A, b"one\ntwo\n\nfour\n") == b"[0] one\n[0] two\n[0] \n[0] four\n"


def test_a_line_waits_for_its_end(screen: Screen) -> None:
    assert screen.says(A, b"he", b"ll") == b""
    assert screen.says(B, b"whole\n") == b"[1] whole\n"
    assert screen.says(A, b"o\n") == b"[0] hello\n"


def test_the_last_line_needs_no_end(screen: Screen) -> None:
    assert screen.says(A, b"one\ntwo") == b"[0] one\n"
    assert screen.ends(A) == b"[0] two\n"
    assert screen.ends(A) == b""


def test_bytes_pass_as_they_are(screen: Screen) -> None:
    line = bytes(set(range(256)) - set(b"\r\n"))
    assert screen.says(A, line + b"\n", b"\xff\x00\r\n") == b"[0] " + line + b"\n[0] \xff\x00\r\n"


def test_a_long_line_comes_in_pieces(screen: Screen) -> None:
    assert screen.says(A, b"x" * 15) == b""
    assert screen.says(A, b"yz") == b"[0] " + b"x" * 15 + b"yz"
    assert screen.says(A, b"end\n", b"next\n") == b"end\n[0] next\n"


def test_a_long_line_is_broken_only_for_others(screen: Screen) -> None:
    assert screen.says(A, b"x" * 16) == b"[0] " + b"x" * 16
    assert screen.says(B, b"short\n") == b"\n[1] short\n"
    assert screen.says(A, b"rest\n") == b"[0] rest\n"


def test_updates_in_a_log_stay_compact(log: Screen) -> None:
    assert log.says(A, b"\r 1%", b"\r 2%", b"\r 3%\n") == b"[0]  1%\r[0]  2%\r[0]  3%\n"
    assert log.says(A, b" 1%\r", b" 2%\r", b"\n") == b"[0]  1%\r[0]  2%\r\n"


def test_updates_in_a_log_do_not_swallow_lines_of_others(log: Screen) -> None:
    assert log.says(A, b"1%\r") == b"[0] 1%\r"
    assert log.says(B, b"hello\n") == b"\n[1] hello\n"
    assert log.says(A, b"2%\r", b"3%\n") == b"[0] 2%\r[0] 3%\n"


@pytest.mark.parametrize("cut", range(1, 8))
def test_carriage_return_and_newline_are_one_end_however_they_come(log: Screen, cut: int) -> None:
    text = b"ab\r\ncd\r\n"
    assert log.says(A, text[:cut], text[cut:]) == b"[0] ab\r\n[0] cd\r\n"


def test_an_update_ends_with_its_worker(log: Screen) -> None:
    assert log.says(A, b"1%\r2%") == b"[0] 1%\r"
    assert log.ends(A) == b"[0] 2%\n"
    assert log.says(B, b"1%\r") == b"[1] 1%\r"
    assert log.ends(B) == b"\n"


def test_a_bar_on_a_terminal_is_drawn_at_once_and_stays_at_the_bottom(terminal: Screen) -> None:
    assert terminal.says(A, b"\r1%") == b"\r[0] 1%" + ERASE_TO_END
    assert terminal.says(B, b"hello\n") == CLEAR + b"[1] hello\n[0] 1%"
    assert terminal.says(A, b"\r2", b"%") == b"\r[0] 2" + ERASE_TO_END + b"\r[0] 2%" + ERASE_TO_END
    assert terminal.says(A, b"\rdone\n") == CLEAR + b"[0] done\n"
    assert terminal.says(B, b"bye\n") == b"[1] bye\n"


def test_a_bar_that_returns_after_itself(terminal: Screen) -> None:
    assert terminal.says(A, b"1%\r") == b"\r[0] 1%" + ERASE_TO_END
    assert terminal.says(A, b"\n") == b"\n"
    assert terminal.says(A, b"next\n") == b"[0] next\n"


def test_the_tail_is_bounded_and_keeps_the_last_update_only() -> None:
    tail = Tail(lines=3, size_bytes=20)
    tail.add(
        [Piece(b"1%", b"\r"), Piece(b"", b"\r"), Piece(b"2%", b"\n"), Piece(b"a", b""), Piece(b"b", b"\n")]
    )
    assert tail.lines() == [b"2%", b"ab"]
    tail.add([Piece(str(number).encode(), b"\n") for number in range(9)])
    assert tail.lines() == [b"6", b"7", b"8"]
    tail.add([Piece(b"x" * 15, b"\n")])
    assert tail.lines() == [b"7", b"8", b"x" * 15]
    tail.add([Piece(b"y" * 99, b"\n")])
    assert tail.lines() == [b"y" * 20]


def test_a_sink_does_not_wait_for_its_reader() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer)
    line = Piece(b"z" * 1000, b"\n")
    while not sink.full:
        sink.show(A, [line])
    assert sink.waiting
    got = b""
    while sink.waiting:
        got += os.read(reader, 1 << 16)
        sink.flush()
    assert len(got) >= BACKLOG_BYTES
    assert os.get_blocking(writer), "the description that we share with others was left as it was"
    for fd in (reader, writer):
        os.close(fd)
    sink.close()


def test_a_sink_without_reader_drops_what_comes() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer)
    os.close(reader)
    sink.show(A, [Piece(b"lost", b"\n")])
    sink.show(A, [Piece(b"lost", b"\n")])
    assert isinstance(sink.problem, BrokenPipeError)
    assert not sink.waiting
    os.close(writer)
    sink.close()


def test_a_sink_does_not_wait_for_a_paused_terminal() -> None:
    controller, terminal = pty.openpty()
    tty.setraw(terminal)
    sink = Sink(terminal)
    termios.tcflow(terminal, termios.TCOOFF)  # Ctrl-S
    sink.show(A, [Piece(b"later", b"\n")])
    assert sink.waiting
    termios.tcflow(terminal, termios.TCOON)
    sink.flush()
    assert os.read(controller, 100) == b"[0] later\n"
    for fd in (controller, terminal):
        os.close(fd)
    sink.close()


def test_a_stream_is_drained_though_its_pipe_stays_open() -> None:
    (source, pipe), (shown, out) = os.pipe(), os.pipe()
    sink = Sink(out)
    stream = OutputStream(os.fdopen(source, "rb", buffering=0), A, sink)
    assert stream.pump() == 0
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    os.write(pipe, b"line\n" + b"." * (size - 10) + b"last")
    stream.drain()
    os.read(shown, 1 << 17)
    stream.close()
    while sink.waiting:
        sink.flush()
    assert os.read(shown, 1 << 17).endswith(b"last\n")
    for fd in (pipe, shown, out):
        os.close(fd)
    sink.close()


def await_written(writer: LogWriter) -> None:
    while writer.waiting:
        assert select.select([writer], [], [], HANGING_S)[0]
        writer.settle()
    writer.close()


def test_a_copy_gets_the_bytes_as_they_come(tmp_path: Path) -> None:
    problems: list[OSError] = []
    source, pipe = os.pipe()
    tail = Tail()
    writer = LogWriter()
    copy = writer.open(str(tmp_path / "copy"), problems.append)
    stream = OutputStream(os.fdopen(source, "rb", buffering=0), A, None, tail, copy)
    assert not stream.held_up
    for data in (b"on", b"e\r\n\xff\0", b"two"):
        os.write(pipe, data)
        stream.pump()
    os.close(pipe)
    assert stream.pump() is None
    stream.close()
    await_written(writer)
    assert (tmp_path / "copy").read_bytes() == b"one\r\n\xff\0two"
    assert tail.lines() == [b"one", b"\xff\0two"]
    assert tail_of_file(str(tmp_path / "copy")) == tail.lines()
    assert problems == []


def test_a_copy_that_cannot_go_on_says_so_once() -> None:
    problems: list[OSError] = []
    writer = LogWriter()
    copy = writer.open("/dev/full", problems.append)
    copy.write(b"lost")
    copy.write(b"lost")
    copy.close()
    await_written(writer)
    assert [problem.errno for problem in problems] == [errno.ENOSPC]


def test_a_copy_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    problems: list[OSError] = []
    writer = LogWriter()
    copy = writer.open(str(tmp_path / "nowhere" / "copy"), problems.append)
    copy.write(b"lost")
    copy.close()
    await_written(writer)
    assert [problem.errno for problem in problems] == [errno.ENOENT]


def test_a_disk_that_hangs_holds_up_only_the_worker(tmp_path: Path) -> None:
    """A named pipe without a reader stands for the disk."""
    path = str(tmp_path / "copy")
    os.mkfifo(path)
    source, pipe = os.pipe()
    writer = LogWriter()
    stream = OutputStream(os.fdopen(source, "rb", buffering=0), A, None, None, writer.open(path, print))
    sent = 0
    while not stream.held_up:
        sent += os.write(pipe, b"%065535d\n" % sent)
        stream.pump()
    sent += os.write(pipe, b"the last words\n")
    os.close(pipe)
    stream.drain()
    stream.close()
    assert writer.waiting
    with open(path, "rb") as disk:  # it is back
        assert len(disk.read()) == sent
    await_written(writer)


def test_a_line_that_began_as_a_prompt_is_collected_whole(tmp_path: Path) -> None:
    source, pipe = os.pipe()
    writer = LogWriter()
    digest = Digest(writer.open(str(tmp_path / "digest"), print), (b"name? A",))
    stream = OutputStream(os.fdopen(source, "rb", buffering=0), A, None, digest=digest)
    for text in (b"name? ", b"Ada\n", b"name? ", b"Bea\nname? A"):
        os.write(pipe, text)
        stream.pump()
        stream.show_prompt()
    os.close(pipe)
    stream.close()
    await_written(writer)
    assert (tmp_path / "digest").read_bytes() == b"[0] name? Ada\n[0] name? A\n"


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    path = str(tmp_path / "copy")
    os.mkfifo(path)
    writer = LogWriter()
    copy = writer.open(path, print)
    copy.write(b"lost")
    copy.close()
    writer.close()
    assert writer.waiting
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # it is back, and the thread ends


def test_the_tail_of_a_file_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"".join(b"%09d\n" % number for number in range(10_000)))
    lines = tail_of_file(str(tmp_path / "log"), size_bytes=50)
    assert lines[-1] == b"000009999"
    assert sum(map(len, lines)) <= 50
    assert tail_of_file(str(tmp_path / "nothing")) == []


def test_a_prompt_is_shown_before_its_line_ends_and_the_line_goes_on_behind_it() -> None:
    screen = Screen(TerminalView())
    splitter = screen.splitters[A]
    assert screen.says(A, b"\r10%", b"\n", b"name? ") == b"\r[0] 10%" + ERASE_TO_END + CLEAR + b"[0] 10%\n"
    assert screen.view.render(A, splitter.give_beginning(), b"") == b"[0] name? "
    assert splitter.give_beginning() == []
    assert screen.says(A, b"Ada\n", b"more? ") == b"Ada\n"
    assert screen.view.render(A, splitter.give_beginning(), b"") == b"[0] more? "
    assert screen.says(B, b"line\n") == b"\n[1] line\n"
    assert screen.says(A, b"no\n", b"left? ") == b"[0] no\n"
    assert screen.view.render(A, splitter.give_beginning(), b"") == b"[0] left? "
    assert screen.ends(A) == b"\n"
    assert screen.ends(A) == b""


class Capture(list[str]):
    """Stands for `sys.stdout`, and can do no more than `print` needs; an empty one is false."""

    def write(self, text: str) -> None:
        self.append(text)


class Broken(Capture):
    encoding = "no such encoding"

    def fileno(self) -> None:
        """As one that has none may say."""


@pytest.mark.parametrize(("stream", "shown"), [(Capture(), ["[0] one\n", "[0] two\n"]), (Broken(), [])])
def test_what_stands_for_our_stream_may_be_anything(
    monkeypatch: pytest.MonkeyPatch, stream: Capture, shown: list[str]
) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    out, err = open_sinks()
    try:
        for text in (b"one\n", b"two\n"):
            out.show(A, LineSplitter(16).feed(text))
    finally:
        out.close()
        err.close()
    assert stream == shown
    assert bool(out.problem) is not bool(shown)
