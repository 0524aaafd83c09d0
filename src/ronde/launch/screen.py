r"""The output of many workers on the two streams of one launcher: bytes in, whole lines out, each with its prefix.

Rules

1. Lines of different workers never mix. A line without an end is passed on in pieces of 64 KiB, and another worker's
   line may break it between two pieces.
2. Bytes are passed on unchanged, in any encoding.
3. Text that ends with a carriage return updates a line (a progress bar). In a file or pipe it keeps its carriage
   return, so the log is as compact as the worker wrote it. On a terminal the last bar stays the bottom line; lines of
   other workers appear above it.
4. Memory is bounded: a worker that is `BACKLOG_BYTES` ahead of the reader blocks on its full pipe.
5. The beginning of a line is shown only if the user may have to answer it: on a terminal, if its worker also reads the
   terminal (`OutputStream.show_prompt`).
6. Writing never blocks the agent: neither a paused terminal, nor a reader that does not read, nor a hanging disk
   (`process/disk`). Only Python code that replaces `sys.stdout` may take any time.

    worker's pipe -> OutputStream (LineSplitter) -> pieces -> Sink (LogView | TerminalView) -> bytes -> stream
                        \                             \-> Tail (the last lines, for the report), Digest (a selection)
                         \-> LogFile (a copy)

`Screen` holds the two sinks and takes the lines of the launcher itself. `launch/agent/outputs` decides which stream of
which worker goes where.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import select
import selectors
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import IO, NamedTuple, Protocol, TextIO

from ronde.launch.loop import Loop, Order
from ronde.process.disk import LogFile

__all__ = [
    "Digest",
    "LineSplitter",
    "LogView",
    "OutputStream",
    "Piece",
    "Screen",
    "Sink",
    "Source",
    "Streams",
    "Tail",
    "TerminalView",
    "claim_standard_streams",
    "open_sinks",
    "tail_of_file",
]

READ_BYTES = 64 * 1024
PIECE_BYTES = 64 * 1024
BACKLOG_BYTES = 256 * 1024
ERASE_TO_END = b"\x1b[K"


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of one worker, and the prefix of its lines (at this moment, if it has the time)."""

    rank: int
    name: str
    prefix: bytes = field(compare=False)


class Piece(NamedTuple):
    r"""A line with its end, \n or \r\n; an update with its end, \r; or the beginning of a long line, without end."""

    text: bytes
    end: bytes


class LineSplitter:
    """Cuts a stream of bytes, fed in any pieces, into lines and updates."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._rest = b""
        self._updating = False  # whether the last piece that ended was an update
        self._midline = False  # whether the last piece was the beginning of a line

    @property
    def unfinished_line(self) -> bytes:
        """The beginning of a line that is not an update."""
        return b"" if self._updating else self._rest

    @property
    def unfinished_update(self) -> bytes:
        """The text so far after the last carriage return."""
        return self._rest if self._updating else b""

    def feed(self, data: bytes) -> list[Piece]:
        """Return the pieces that `data` completes."""
        pieces = []
        lines = (self._rest + data).splitlines(keepends=True)  # bytes end at \n, \r and \r\n only
        self._rest = b""
        for line in lines:
            text = line.rstrip(b"\r\n")
            end = line[len(text) :]
            if not end and len(line) < self._piece_bytes:
                self._rest = line
                break
            pieces.append(Piece(text, end))
            self._updating, self._midline = end == b"\r", not end
        return pieces

    def give_beginning(self) -> list[Piece]:
        """Return the beginning of a line, without waiting for its end."""
        text = self.unfinished_line
        if not text:
            return []
        self._rest, self._midline = b"", True
        return [Piece(text, b"")]

    def finish(self) -> list[Piece]:
        """Return the rest as a line, at the end of the stream."""
        pieces = [Piece(self._rest, b"\n")] if self._rest or self._updating or self._midline else []
        self._rest, self._updating, self._midline = b"", False, False
        return pieces


# The streams of the launcher


class View(Protocol):
    """Renders the pieces of several sources on one stream."""

    def render(self, source: Source, pieces: Iterable[Piece], unfinished_update: bytes) -> bytes:
        """Return the bytes that show the pieces."""


class LogView:
    """A file or pipe: shows everything, in order of arrival."""

    def __init__(self) -> None:
        self._open: Source | None = None  # the source of an update or piece at the end, without a newline
        self._midline = False  # whether it is a piece

    def render(self, source: Source, pieces: Iterable[Piece], unfinished_update: bytes) -> bytes:
        """Return the bytes that show the pieces; an unfinished update waits for its end."""
        out = []
        for text, end in pieces:
            if self._open is not None and self._open != source:
                out.append(b"\n")
                self._open, self._midline = None, False
            if end == b"\r" and not text:
                continue  # the carriage return *before* an update, as tqdm writes it
            if self._midline or (self._open and not text):
                out.append(text + end)
            else:
                out.append(source.prefix + text + end)
            self._open = source if end in (b"", b"\r") else None
            self._midline = not end
        return b"".join(out)


class TerminalView:
    """A terminal: the last update is the bottom line, and lines of others appear above it."""

    def __init__(self) -> None:
        self._bar = b""  # the bottom line, with its prefix
        self._bar_of: Source | None = None
        self._midline_of: Source | None = None  # the source of a partly shown line, with the cursor behind it

    def render(self, source: Source, pieces: Iterable[Piece], unfinished_update: bytes) -> bytes:
        """Return the bytes that show the pieces and the update so far."""
        out = []
        for text, end in pieces:
            if end == b"\r":
                out.append(self._update(source, text))
            else:
                out.append(self._line(source, text, end))
        out.append(self._update(source, unfinished_update))
        return b"".join(out)

    def _update(self, source: Source, text: bytes) -> bytes:
        bar = source.prefix + text
        if not text or (bar == self._bar and not self._midline_of):
            return b""
        leave = b"\n" if self._midline_of else b""
        self._bar, self._bar_of, self._midline_of = bar, source, None
        return leave + b"\r" + self._bar + ERASE_TO_END

    def _line(self, source: Source, text: bytes, end: bytes) -> bytes:
        if self._midline_of == source:
            before = b""
        elif self._midline_of:
            before = b"\n" + source.prefix
        elif self._bar_of == source and not text:
            before = b""  # the bar stays as it is
        elif self._bar_of:
            before = b"\r" + ERASE_TO_END + source.prefix
        else:
            before = source.prefix
        if self._bar_of == source:
            self._bar, self._bar_of = b"", None
        self._midline_of = None if end else source
        return before + text + end + (self._bar if end else b"")


class Sink:
    """A stream of the launcher: takes bytes at any time and writes them when that does not block."""

    def __init__(self, fd: int) -> None:
        self._fd = _own_description(fd)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._buffer = bytearray()
        self.is_terminal = os.isatty(fd)
        self._view: View = TerminalView() if self.is_terminal else LogView()
        self.problem: OSError | None = None  # the error that broke the stream; further bytes are dropped

    def show(self, source: Source, pieces: Iterable[Piece], unfinished_update: bytes = b"") -> None:
        """Write the pieces, rendered for this kind of stream."""
        if self.problem is None:
            self._buffer += self._view.render(source, pieces, unfinished_update)
            self.flush()

    def flush(self) -> None:
        """Write as much as possible without blocking."""
        # If the descriptor blocks, poll() promises that a write of PIPE_BUF bytes does not.
        try:
            while self._buffer and self._poll.poll(0):
                del self._buffer[: os.write(self._fd, self._buffer[: select.PIPE_BUF])]
        except BlockingIOError:
            pass
        except OSError as error:
            self.problem = error
            self._buffer.clear()

    @property
    def waiting(self) -> bool:
        """Whether bytes are still unwritten."""
        return bool(self._buffer)

    @property
    def full(self) -> bool:
        """Whether callers should pause writing to this sink."""
        return len(self._buffer) >= BACKLOG_BYTES

    def fileno(self) -> int:
        """Return the descriptor to select for writing."""
        return self._fd

    def close(self) -> None:
        """Close this object's descriptor; the stream stays open."""
        os.close(self._fd)


def _own_description(fd: int) -> int:
    """Return a descriptor of the same stream; for a terminal or pipe one that does not block, if possible.

    O_NONBLOCK belongs to the open file description, which the shell shares, so this opens a new one.
    """
    if os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode):
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            pass  # a terminal or pipe of another user, or a pipe without reader
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def claim_standard_streams() -> None:
    """Open /dev/null for each of 0, 1 and 2 that is closed, before another file gets that number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


class TextSink(Sink):
    """A Python object in the place of `sys.stdout` or `sys.stderr`, as in a notebook or a test."""

    def __init__(self, fd: int, stream: TextIO) -> None:
        super().__init__(fd)
        self.is_terminal, self._view = False, LogView()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def flush(self) -> None:
        """Write all bytes."""
        text = self._decoder.decode(bytes(self._buffer))
        self._buffer.clear()
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            _flush(self._stream)
        except Exception as error:  # the object is the user's code
            self.problem = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))


def open_sinks(stdout: TextIO | None = None, stderr: TextIO | None = None) -> tuple[Sink, Sink]:
    """Return the sinks of standard output and standard error: the same sink if both are the same file.

    `stdout`, `stderr`: other streams in their places. Flushes the output of this process first.
    """
    streams = (stdout or sys.stdout, stderr or sys.stderr)
    for stream in streams:
        _flush(stream)
    out, err = (None if _is_ours(stream, fd) else stream for fd, stream in enumerate(streams, 1))
    shown = Sink(1) if out is None else TextSink(1, out)
    if err is not None:
        return shown, shown if err is out else TextSink(2, err)
    return shown, shown if out is None and os.path.sameopenfile(1, 2) else Sink(2)


def _flush(stream: TextIO | None) -> None:
    # The stream may be missing, broken or closed, or lack a `flush`.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()  # type: ignore[union-attr]


def _is_ours(stream: TextIO | None, fd: int) -> bool:
    """Return whether the Python stream, if there is one, writes to this descriptor."""
    if stream is None or getattr(stream, "closed", False):
        return True
    try:
        return stream.fileno() == fd or os.path.sameopenfile(stream.fileno(), fd)
    except (AttributeError, OSError, TypeError, ValueError):  # io.UnsupportedOperation is two of them
        return False


# The end of an output


class Tail:
    """The last lines of a stream, bounded in number and in bytes; only the last one of successive updates."""

    def __init__(self, lines: int = 40, size_bytes: int = 16 * 1024) -> None:
        self._lines: deque[bytes] = deque(maxlen=lines)
        self._size_bytes = size_bytes
        self._end = b"\n"  # of the last piece

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add the pieces, and drop the oldest ones."""
        for text, end in pieces:
            if self._lines and self._end == b"\r":
                last = self._lines.pop()
                text = text or last
            elif self._lines and self._end == b"":
                text = self._lines.pop() + text
            self._lines.append(text[-self._size_bytes :])
            self._end = end

    def lines(self) -> list[bytes]:
        """Return the last lines, the oldest first."""
        kept: list[bytes] = []
        room = self._size_bytes
        for line in reversed(self._lines):
            room -= len(line) + 1
            if room < 0 and kept:
                break
            kept.append(line)
        return kept[::-1]


def tail_of_file(path: str, size_bytes: int = 16 * 1024) -> list[bytes]:
    """Return the last lines of a file, the oldest first; none if it cannot be read."""
    tail, splitter = Tail(size_bytes=size_bytes), LineSplitter()
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
            tail.add(splitter.feed(file.read()) + splitter.finish())
    except OSError:
        pass
    return tail.lines()


class Digest:
    """A file with the lines of a stream that contain one of the `needles`, each with its prefix."""

    def __init__(self, file: LogFile, needles: tuple[bytes, ...]) -> None:
        self.file = file
        self._needles = needles
        self._beginning = b""  # of a line that was shown as a prompt

    def add(self, prefix: bytes, pieces: Iterable[Piece]) -> None:
        """Write the matching lines."""
        lines = []
        for text, end in pieces:
            line = self._beginning + text
            is_whole = bool(end) or len(line) >= PIECE_BYTES
            self._beginning = b"" if is_whole else line
            if is_whole and any(needle in line for needle in self._needles):
                lines.append(prefix + line + b"\n")
        self.file.write(b"".join(lines))


class OutputStream:
    """One output pipe of one worker, passed on to a sink (None: not shown) and to files."""

    def __init__(
        self,
        pipe: IO[bytes],
        source: Source,
        sink: Sink | None,
        tail: Tail | None = None,
        copy: LogFile | None = None,
        *,
        timestamps: bool = False,
        digest: Digest | None = None,
    ) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._source = source
        self._splitter = LineSplitter()
        self._sink = sink
        self._tail = tail
        self._copy = copy
        self._timestamps = timestamps
        self._digest = digest

    @property
    def held_up(self) -> bool:
        """Whether the reader should pause, because the sink or a file is full."""
        fed = (self._sink, self._copy, self._digest.file if self._digest else None)
        return any(each is not None and each.full for each in fed)

    def fileno(self) -> int:
        """Return the descriptor to select for reading."""
        return self._pipe.fileno()

    @property
    def name(self) -> str:
        """Which stream of the worker it is: stdout or stderr."""
        return self._source.name

    def rename(self, rank: int, prefix: bytes) -> None:
        """Show the lines from now on as those of this rank."""
        self.drain()
        self._source = replace(self._source, rank=rank, prefix=prefix)

    def pump(self) -> int | None:
        """Pass on the bytes in the pipe, at most 64 KiB; return their number, or None at the end of the stream."""
        try:
            data = os.read(self._pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return 0
        if self._copy is not None:
            self._copy.write(data)
        self._pass_on(self._splitter.feed(data) if data else self._splitter.finish())
        return len(data) or None

    @property
    def may_be_prompt(self) -> bool:
        """Whether the output stopped in the middle of a line, on its way to a terminal."""
        return self._sink is not None and self._sink.is_terminal and self._splitter.unfinished_line != b""

    def show_prompt(self) -> None:
        """Pass on the beginning of a line, which may be a question that the user has to answer."""
        self._pass_on(self._splitter.give_beginning())

    def drain(self) -> None:
        """Pass on everything in the pipe, which includes all that an exited worker wrote."""
        left = fcntl.fcntl(self._pipe, fcntl.F_GETPIPE_SZ)
        while left > 0 and (got := self.pump()):
            left -= got

    def close(self) -> None:
        """Pass on an unfinished line, and close the pipe and the copy."""
        self._pass_on(self._splitter.finish())
        self._pipe.close()
        if self._copy is not None:
            self._copy.close()
        if self._digest is not None:
            self._digest.file.close()

    def _pass_on(self, pieces: list[Piece]) -> None:
        if self._tail is not None:
            self._tail.add(pieces)
        if self._digest is not None:
            self._digest.add(self._source.prefix, pieces)
        if self._sink is not None:
            source = self._source
            if self._timestamps:
                source = replace(source, prefix=time.strftime("%F %T ").encode() + source.prefix)
            self._sink.show(source, pieces, self._splitter.unfinished_update)


Streams = tuple[TextIO | None, TextIO | None]

_LAUNCHER = Source(-1, "ronde", b"")


class Screen:
    """Standard output and standard error; `broken` is called once for each that becomes unwritable.

    `streams`: objects with a method `write` in their places; None: the process's own.
    """

    def __init__(self, loop: Loop, broken: Callable[[], None], streams: Streams = (None, None)) -> None:
        self._loop = loop
        self._broken = broken
        self.out, self.err = open_sinks(*streams)
        self._sinks = {self.out, self.err}
        self._gone: set[Sink] = set()

    def tell(self, text: str) -> None:
        """Show a sentence of the launcher, after its name."""
        self.say(f"ronde: {text}".encode(errors="backslashreplace"))

    def say(self, line: bytes) -> None:
        """Show a line of the launcher as it is."""
        self.err.show(_LAUNCHER, [Piece(line, b"\n")])

    def balance(self) -> None:
        """Watch the streams that have unwritten lines, and report the broken ones. Call this before each turn."""
        for sink in self._sinks:
            self._loop.watch(
                sink.fileno(), Order.SINKS, sink.flush, wanted=sink.waiting, events=selectors.EVENT_WRITE
            )
        for sink in {sink for sink in self._sinks if sink.problem} - self._gone:
            self._gone.add(sink)
            self._broken()

    @property
    def waiting(self) -> bool:
        """Whether lines are still unwritten."""
        return any(sink.waiting for sink in self._sinks)

    def close(self) -> None:
        """Stop writing to the streams, which stay open."""
        for sink in self._sinks:
            self._loop.unwatch(sink.fileno())
            sink.close()
