"""Reports an uncaught exception of a worker to its launcher at once, before the worker ends.

Between the two may lie seconds: Python joins threads and runs the handlers of `atexit`, and among the first things that
go are the connections to other ranks. Those fail, end sooner, and would be taken for the cause.

The launcher gives all its workers one pipe. The variable `_RONDE_UNCAUGHT` holds its descriptor, device and inode: a
process that has inherited the variable, but not the descriptor, leaves alone what has that number there. A worker first
writes its error file, then its rank into the pipe.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from ronde.environment import environment
from ronde.process.error_file import ERROR_FILE, write_error_file

__all__ = ["Announcements", "announce", "follow", "mark_recorded"]

_VARIABLE = "_RONDE_UNCAUGHT"
_READ_BYTES = 4096


class Announcements:
    """The launcher's end of the pipe. Workers start with `environment` and inherit `worker_fd` under its number."""

    def __init__(self) -> None:
        self._fd, self.worker_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""

    @property
    def environment(self) -> dict[str, str]:
        """What workers find in their environment."""
        return {_VARIABLE: _identify(self.worker_fd)}

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a worker has raised."""
        return self._fd

    def read(self) -> list[int]:
        """Return the ranks that have raised an exception since the last call."""
        *lines, self._rest = (self._rest + os.read(self._fd, _READ_BYTES)).split(b"\n")
        return [int(line) for line in lines if line.isdigit()]

    def close(self) -> None:
        """Let go of both ends."""
        os.close(self._fd)
        os.close(self.worker_fd)


def _identify(fd: int) -> str:
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


class _Hook:
    """What comes after the `sys.excepthook` that it finds."""

    pid = 0  # the process whose exceptions it announces

    def install(self) -> None:
        """Begin in this process; a forked child has its parent's already."""
        if not self.pid:
            self._previous, sys.excepthook = sys.excepthook, self._see
        self.pid = os.getpid()

    def _see(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous(kind, error, trace)
        # A prompt goes on after an exception, a forked child is not the worker, and Ctrl-C is no failure.
        if isinstance(error, Exception) and self.pid == os.getpid() and not sys.flags.interactive:
            announce(error)


_hook = _Hook()


def follow() -> None:
    """Announce the exception that ends this process, if there will be one. Without a launcher nothing happens."""
    if _hook.pid != os.getpid() and _descriptor() is not None:
        _hook.install()


def announce(error: Exception) -> None:
    """Tell the launcher that this exception ends the process."""
    path, fd = environment().get(ERROR_FILE), _descriptor()
    try:
        if path and not getattr(error, "_ronde_recorded", False):
            write_error_file(path, error)
        if fd is not None:
            os.write(fd, f"{environment().get('RANK', '')}\n".encode())
    except OSError:
        pass  # the launcher still sees how the process ends


def mark_recorded(error: BaseException) -> None:
    """Remember that the exception is in the error file already, perhaps in the user's own way."""
    error._ronde_recorded = True  # type: ignore[attr-defined]


def _descriptor() -> int | None:
    """Return the worker's end of the pipe, which what it starts does not inherit; None if there is none here."""
    told = environment().get(_VARIABLE, "")
    try:
        fd = int(told.partition(":")[0])
        if _identify(fd) != told:
            return None
        os.set_inheritable(fd, False)
    except (ValueError, OSError):
        return None
    return fd
