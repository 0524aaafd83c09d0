"""Reports an uncaught exception of a worker to its launcher at once, before the worker ends, and that it leaves.

The end of a worker may take seconds: Python joins threads and runs the handlers of `atexit`, and closes the connections
to other ranks early. Those ranks fail, end sooner, and would look like the cause.

All workers of a launcher share one pipe. The variable `_RONDE_UNCAUGHT` holds its descriptor, device and inode, so a
process that inherits the variable without the descriptor does not write to another file of that number. A worker first
writes its error file, then its rank and `raised` into the pipe. Before it leaves the other ranks it writes `left`: they
may fail then, and only its end tells whether it has failed itself (`sys.exit(3)`). Before it waits for the others in
`ronde.init` it writes `joins` and the number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType

from ronde.environment import environment
from ronde.light_typing import Literal, NamedTuple
from ronde.process.error_file import ERROR_FILE, write_error_file

__all__ = [
    "Announcement",
    "Announcements",
    "announce_departure",
    "announce_exception",
    "announce_joining",
    "announce_uncaught",
    "mark_recorded",
]

_VARIABLE = "_RONDE_UNCAUGHT"
_READ_BYTES = 4096


What = Literal["raised", "left", "joins"]


class Announcement(NamedTuple):
    """A worker has raised an exception that nothing catches, leaves the other ranks, or joins them: `size` in all."""

    rank: int
    what: What
    size: int = 0


class Announcements:
    """The launcher's end of the pipe. Workers start with `environment` and inherit `worker_fd` under its number."""

    def __init__(self) -> None:
        self._fd, self.worker_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""

    @property
    def environment(self) -> dict[str, str]:
        """The variables for workers."""
        return {_VARIABLE: _identify(self.worker_fd)}

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a worker has announced something."""
        return self._fd

    def read(self) -> list[Announcement]:
        """Return what workers have announced since the last call."""
        content = self._rest
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(
                self._fd, _READ_BYTES
            ):  # all, so that it is known before the end of a worker
                content += piece
        *lines, self._rest = content.split(b"\n")
        return [found for line in lines if (found := _parse(line.decode(errors="replace")))]

    def close(self) -> None:
        """Close both ends."""
        os.close(self._fd)
        os.close(self.worker_fd)


def _parse(line: str) -> Announcement | None:
    """Return the announcement of a line, None if it is none."""
    match line.split(" "):
        case [rank, ("raised" | "left") as what] if rank.isdecimal():
            return Announcement(int(rank), what)
        case [rank, "joins", size] if rank.isdecimal() and size.isdecimal():
            return Announcement(int(rank), "joins", int(size))
    return None


def _identify(fd: int) -> str:
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


class _Hook:
    """A `sys.excepthook` that calls the previous one first."""

    pid = 0  # the process whose exceptions it announces

    def install(self) -> None:
        """Install the hook in this process; a forked child inherits its parent's."""
        if not self.pid:
            self._previous, sys.excepthook = sys.excepthook, self._on_exception
        self.pid = os.getpid()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._previous(kind, error, trace)
        # An interactive prompt survives an exception, a forked child is not the worker, and Ctrl-C is not a failure.
        if isinstance(error, Exception) and self.pid == os.getpid() and not sys.flags.interactive:
            announce_exception(error)


_hook = _Hook()


def announce_uncaught() -> None:
    """Announce a future uncaught exception of this process. Does nothing without a launcher."""
    if _hook.pid != os.getpid() and _descriptor() is not None:
        _hook.install()


def announce_exception(error: Exception) -> None:
    """Tell the launcher that this exception ends the process."""
    path = environment().get(ERROR_FILE)
    try:
        if path and not getattr(error, "_ronde_recorded", False):
            write_error_file(path, error)
    except OSError:
        return  # the launcher still sees how the process ends
    _announce("raised")


def announce_departure() -> None:
    """Tell the launcher that this process leaves the other ranks. Does nothing in a forked child."""
    if _hook.pid == os.getpid():
        _announce("left")


def announce_joining(size: int) -> None:
    """Tell the launcher that this process will wait for the other ranks of its world, `size` in all."""
    _announce("joins", f" {size}")


def _announce(what: What, details: str = "") -> None:
    fd = _descriptor()
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, f"{environment().get('RANK', '')} {what}{details}\n".encode())


def mark_recorded(error: BaseException) -> None:
    """Note that the error file has this exception, perhaps written by the user's code."""
    error._ronde_recorded = True  # type: ignore[attr-defined]


def _descriptor() -> int | None:
    """Return the worker's end of the pipe, and make it non-inheritable; None if this process has none."""
    told = environment().get(_VARIABLE, "")
    try:
        fd = int(told.partition(":")[0])
        if _identify(fd) != told:
            return None
        os.set_inheritable(fd, False)
    except (ValueError, OSError):
        return None
    return fd
