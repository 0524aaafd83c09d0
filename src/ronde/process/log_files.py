"""Files that get copies of streams, written by a thread of their own: a disk that hangs holds up nobody who supervises.

1. Who has something to write leaves it here and goes on. What the disk does not take yet is kept; a file that is `full`
   should get no more, until it is not.
2. The descriptor becomes readable when a file is full no more, has ended or has failed; then `settle` is to be called.
3. Nothing is lost while somebody waits for it: until `waiting` is false. Who does not want to wait closes, and what
   the disk has not taken by then is lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

from ronde.new_files import open_for_writing

__all__ = ["LogFile", "LogWriter"]

BACKLOG_BYTES = 256 * 1024  # of each file


class LogFile:
    """A file that gets a copy of a stream, byte for byte, until that fails: then `complain` is told, once."""

    def __init__(
        self, writer: LogWriter, path: str, complain: Callable[[OSError], None], shared: bool = False
    ) -> None:
        self._writer = writer
        self._path = path
        self._flags = os.O_APPEND if shared else os.O_TRUNC
        self._fd: int | None = None
        self._closed = False
        self.complain = complain
        self.backlog_bytes = 0  # guarded by the writer
        self.problem: OSError | None = None

    @property
    def full(self) -> bool:
        """Whether those who feed this file should hold on."""
        return self.backlog_bytes >= BACKLOG_BYTES

    def write(self, data: bytes) -> None:
        """Add the bytes."""
        if data and self.problem is None:
            self._writer.add(self, data)

    def close(self) -> None:
        """End the file, once it has all its bytes. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._writer.add(self, None)

    def perform(self, data: bytes | None) -> None:
        """In the writer's thread: make the file, write to it, or (None) close it. Raises OSError."""
        if self._fd is None and data is not None:
            self._fd = open_for_writing(self._path, self._flags)
        while data:
            assert self._fd is not None
            data = data[os.write(self._fd, data) :]
        if data is None and self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class LogWriter:
    """The thread that writes log files; it begins with the first of them. Close it at the end."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._todo: deque[tuple[LogFile, bytes | None]] = deque()
        self._open = 0  # files that have not ended
        self._failed: list[LogFile] = []  # whose failure has not been told
        self._over = False
        self._thread: threading.Thread | None = None

    def open(self, path: str, complain: Callable[[OSError], None], shared: bool = False) -> LogFile:
        """Return a new file, which replaces an old one; if it cannot be made, `complain` is told.

        A `shared` one adds to what is there: others write it, too.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ronde-logs", daemon=True)
            self._thread.start()
        file = LogFile(self, path, complain, shared)
        self._open += 1
        self.add(file, b"")
        return file

    def add(self, file: LogFile, data: bytes | None) -> None:
        """Have the bytes written; None: have the file closed."""
        with self._changed:
            file.backlog_bytes += len(data or b"")
            self._todo.append((file, data))
            self._changed.notify()

    def fileno(self) -> int:
        """Return the descriptor to select for reading."""
        return self._bell

    def settle(self) -> None:
        """Tell of files that have failed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with self._changed:
            failed, self._failed = self._failed, []
        for file in failed:
            assert file.problem is not None
            file.complain(file.problem)

    @property
    def waiting(self) -> bool:
        """Whether a file has not ended, or its failure has not been told."""
        with self._changed:
            return self._open > 0 or bool(self._failed)

    def close(self) -> None:
        """Write no more. A second call does nothing."""
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify()
            is_busy = self._open > 0
        if self._thread is None:
            os.close(self._bell)
        elif not is_busy:
            self._thread.join()  # else the disk may hang: the thread ends when that does, or with the process

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
        os.close(self._bell)

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
                os.eventfd_write(self._bell, 1)
