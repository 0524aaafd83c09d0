"""A disk that may not answer (a network file system without its server): threads use it, and callers wait briefly.

`Disk` does single operations in a limited time. There is one operation at a time. After one has timed out, others fail
at once until it ends, so many workers together wait once and not once each. An operation that ends too late is undone.

`LogWriter` writes copies of streams into files, so that the disk does not delay the launcher:

1. `LogFile.write` returns at once and keeps the bytes that the disk has not taken yet. A caller should write no more to
   a file that is `full`.
2. The descriptor becomes readable when a file is no longer full, has ended or has failed; then the caller calls
   `settle`.
3. All bytes are in the files when `waiting` is false. A caller that does not wait for that closes the writer, and loses
   the bytes that the disk has not taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ronde.trusted_files import open_for_writing

__all__ = [
    "Disk",
    "LogFile",
    "LogWriter",
]

T = TypeVar("T")

PATIENCE_NS = 10 * 10**9  # well below the silence after which a node counts as lost


class Disk:
    """The disk of some files. One thread asks for operations."""

    def __init__(self, patience_ns: int = PATIENCE_NS) -> None:
        self._patience_ns = patience_ns
        self._open: threading.Thread | None = None  # with an operation that timed out

    @property
    def is_silent(self) -> bool:
        """Whether an operation has timed out and not ended since."""
        return self._open is not None and self._open.is_alive()

    def ask(self, do: Callable[[], T], take_back: Callable[[T], object] | None = None) -> T:
        """Return the result of `do`, which uses the disk; if that ends too late, it is undone.

        Raises the exception of `do`, and OSError if `do` takes too long.
        """
        if not self.is_silent:
            question = _DiskRequest(do, take_back)
            thread = threading.Thread(target=question.perform, name="ronde-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process can start no thread
                return do()
            thread.join(self._patience_ns / 1e9)
            if question.is_answered():
                return question.answer()
            self._open = thread
        raise OSError(errno.ETIMEDOUT, f"the disk has not answered for {self._patience_ns / 1e9:g} s")


class _DiskRequest(Generic[T]):
    def __init__(self, do: Callable[[], T], take_back: Callable[[T], object] | None) -> None:
        self._do = do
        self._take_back = take_back
        self._lock = threading.Lock()
        self._answers: list[T] = []
        self._problem: Exception | None = None
        self._given_up = False

    def perform(self) -> None:
        """Do the operation. Runs in a thread."""
        try:
            answer = self._do()
        except Exception as problem:
            self._problem = problem
            return
        with self._lock:
            if not self._given_up:
                self._answers.append(answer)
                return
        if self._take_back is not None:
            with contextlib.suppress(OSError):
                self._take_back(answer)

    def is_answered(self) -> bool:
        """Return whether there is a result; after False, a later result is undone."""
        with self._lock:
            self._given_up = not self._answers and self._problem is None
            return not self._given_up

    def answer(self) -> T:
        """Return the result, or raise the exception of the operation."""
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        return self._answers[0]


# Copies of streams


BACKLOG_BYTES = 256 * 1024  # of each file


class LogFile:
    """A file with a copy of a stream, byte for byte; `complain` gets the error that ends it."""

    def __init__(
        self, writer: LogWriter, path: str, complain: Callable[[OSError], None], shared: bool = False
    ) -> None:
        self._writer = writer
        self._path = path
        self._flags = os.O_APPEND if shared else os.O_TRUNC
        self._fd: int | None = None
        self._closed = False
        self.complain = complain
        self.backlog_bytes = 0  # the writer's lock guards it
        self.problem: OSError | None = None

    @property
    def full(self) -> bool:
        """Whether callers should pause writing to this file."""
        return self.backlog_bytes >= BACKLOG_BYTES

    def write(self, data: bytes) -> None:
        """Add the bytes."""
        if data and self.problem is None:
            self._writer.add(self, data)

    def close(self) -> None:
        """End the file after its bytes. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._writer.add(self, None)

    def perform(self, data: bytes | None) -> None:
        """Make the file, write to it, or (None) close it. Runs in the writer's thread. Raises OSError."""
        if self._fd is None and data is not None:
            self._fd = open_for_writing(self._path, self._flags)
        while data:
            assert self._fd is not None
            data = data[os.write(self._fd, data) :]
        if data is None and self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class LogWriter:
    """The thread that writes log files; it starts with the first one. Close it at the end."""

    def __init__(self) -> None:
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._todo: deque[tuple[LogFile, bytes | None]] = deque()
        self._open = 0  # files that have not ended
        self._failed: list[LogFile] = []  # whose error is still to be reported
        self._over = False
        self._thread: threading.Thread | None = None

    def open(self, path: str, complain: Callable[[OSError], None], shared: bool = False) -> LogFile:
        """Return a new file, which replaces an old one; `complain` gets the error if that fails.

        A `shared` file is appended to, because other processes write it, too.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ronde-logs", daemon=True)
            self._thread.start()
        file = LogFile(self, path, complain, shared)
        self._open += 1
        self.add(file, b"")
        return file

    def add(self, file: LogFile, data: bytes | None) -> None:
        """Queue bytes to write; None: queue the end of the file."""
        with self._changed:
            file.backlog_bytes += len(data or b"")
            self._todo.append((file, data))
            self._changed.notify()

    def fileno(self) -> int:
        """Return the descriptor to select for reading."""
        return self._wakeup

    def settle(self) -> None:
        """Report the files that have failed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        with self._changed:
            failed, self._failed = self._failed, []
        for file in failed:
            assert file.problem is not None
            file.complain(file.problem)

    @property
    def waiting(self) -> bool:
        """Whether a file has not ended, or its error is still to be reported."""
        with self._changed:
            return self._open > 0 or bool(self._failed)

    def close(self) -> None:
        """Stop writing. A second call does nothing."""
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify()
            is_busy = self._open > 0
        if self._thread is None:
            os.close(self._wakeup)
        elif not is_busy:
            self._thread.join()  # else the disk may hang, and the thread ends with it or with the process

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._todo or self._over):
                    self._changed.wait()
                if self._over:
                    break
                file, data = self._todo.popleft()
            problem: OSError | None = None
            try:
                if file.problem is None or data is None:
                    file.perform(data)
            except OSError as error:
                problem = error
            self._done(file, data, problem)
        for file in {file for file, _ in self._todo}:
            with contextlib.suppress(OSError):
                file.perform(None)
        os.close(self._wakeup)

    def _done(self, file: LogFile, data: bytes | None, problem: OSError | None) -> None:
        with self._changed:
            was_full = file.full
            file.backlog_bytes -= len(data or b"")
            if problem and file.problem is None:
                file.problem = problem
                self._failed.append(file)
            if data is None:
                self._open -= 1
            if problem or data is None or (was_full and not file.full):
                os.eventfd_write(self._wakeup, 1)
