"""Reports an uncaught exception of a worker to its launcher at once, before the worker ends, and that it leaves.

The end of a worker may take seconds: Python joins threads and runs the handlers of `atexit`, and closes the connections
to other ranks early. Those ranks fail, end sooner, and would look like the cause.

All workers of a launcher share one pipe. The variable `_RONDE_UNCAUGHT` holds its descriptor, device and inode, so a
process that inherits the variable without the descriptor does not write to another file of that number. A worker first
writes its error file, then its rank and round (`3@0`) and `raised` into the pipe. Before it leaves the other ranks it
writes `left`: they may fail then, and only its end tells whether it has failed itself (`sys.exit(3)`). Before it waits
for the others in `ronde.init` it writes `joins`, the number of ranks, and the epoch of the world (`comm/world_epochs`);
afterwards `joined`.

A launcher that shows the error file's traceback in its report sets `LEAVES_TRACEBACK`. A worker then notes in its
error file that it leaves the traceback to the report, and prints one line, which ends with `POINTER`. A consequence of
another rank's failure, which reports do not show, is printed with its traceback, by the rules of `process/exceptions`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

from ronde.environment import environment
from ronde.process.exceptions import (
    ERROR_FILE,
    blames_peer,
    exception_text,
    headline,
    leave_to_report,
    left_debugger,
    shows_all_frames,
    write_error_file,
)

__all__ = [
    "LEAVES_TRACEBACK",
    "POINTER",
    "Announcement",
    "Announcements",
    "ErrorHandler",
    "announce_departure",
    "announce_exception",
    "announce_joined",
    "announce_joining",
    "announce_uncaught",
    "mark_recorded",
    "record",
]

LEAVES_TRACEBACK = "_RONDE_LEAVES_TRACEBACK"
POINTER = " (the traceback follows in the report)"
_VARIABLE = "_RONDE_UNCAUGHT"
_READ_BYTES = 4096


What = Literal["raised", "left", "joins", "joined"]


class Announcement(NamedTuple):
    """A worker has raised an exception that nothing catches, leaves the other ranks, begins or ends to wait for them.

    `size`: how many ranks it joins, with itself. `epoch`: of the world that they form. `round`: that in which it
    has this rank, None if the program has not been told.
    """

    rank: int
    what: What
    size: int = 0
    epoch: int = 0
    round: int | None = None


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

    def is_held_by(self, pid: int) -> bool:
        """Return whether a process has the worker's end open; also if that cannot be found out.

        A worker that has announced something closes it when it replaces its program (`os.execv`).
        """
        try:
            there = os.stat(f"/proc/{pid}/fd/{self.worker_fd}")
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return os.path.samestat(there, os.fstat(self.worker_fd))

    def close(self) -> None:
        """Close both ends."""
        os.close(self._fd)
        os.close(self.worker_fd)


def _parse(line: str) -> Announcement | None:
    """Return the announcement of a line, None if it is none."""
    place, *words = line.split(" ")
    rank, _, number = place.partition("@")
    round = int(number) if number.isdecimal() else None
    match words:
        case ["raised" | "left" | "joined" as what] if rank.isdecimal():
            return Announcement(int(rank), what, round=round)
        case ["joins", size, epoch] if all(each.isdecimal() for each in (rank, size, epoch)):
            return Announcement(int(rank), "joins", int(size), int(epoch), round)
    return None


def _identify(fd: int) -> str:
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


# In a worker


class _Hook:
    """A `sys.excepthook` that shows the exception, by the program's own hook if it has one, and announces it."""

    pid = 0  # the process whose exceptions it announces

    def install(self) -> None:
        """Install the hook in this process; a forked child inherits its parent's."""
        if not self.pid:
            self._previous, sys.excepthook = sys.excepthook, self._on_exception
        self.pid = os.getpid()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # An interactive prompt survives an exception, a forked child is not the worker, and Ctrl-C is not a failure.
        if not isinstance(error, Exception) or self.pid != os.getpid() or sys.flags.interactive:
            self._previous(kind, error, trace)
            return
        is_in_file = _write_error(error)
        if self._previous is not sys.__excepthook__ or not _show(error, leaves_traceback=is_in_file):
            self._previous(kind, error, trace)
        if is_in_file is not None:
            _announce("raised")


def _show(error: Exception, leaves_traceback: bool | None) -> bool:
    """Print what this worker has to say of an exception. Return whether that was possible.

    `leaves_traceback`: the launcher will show the traceback, if it is one that does so.
    """
    is_asked = environment().get(LEAVES_TRACEBACK) and not shows_all_frames()
    is_own_stream = sys.stderr is sys.__stderr__  # not one that writes a log of the program's
    try:
        if not (leaves_traceback and is_asked and is_own_stream) or blames_peer(error):
            text = exception_text(error)
        elif left_debugger(error):
            text = ""  # the report has all that there is to say
        elif leave_to_report(environment().get(ERROR_FILE, "")):
            text = f"{headline(error)}{POINTER}\n"
        else:
            text = exception_text(error)
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # standard error may be closed, and the exception's text is the user's code
        return False
    return True


_hook = _Hook()


def announce_uncaught() -> None:
    """Announce a future uncaught exception of this process. Does nothing without a launcher."""
    if _hook.pid != os.getpid() and _descriptor(environment()) is not None:
        _hook.install()


def announce_exception(error: Exception) -> None:
    """Tell the launcher that this exception ends the process."""
    if _write_error(error) is not None:
        _announce("raised")


def _write_error(error: Exception) -> bool | None:
    """Return whether the error file has the exception; None if it cannot be written.

    The launcher then still sees how the process ends.
    """
    path = environment().get(ERROR_FILE)
    if not path:
        return False
    try:
        if not getattr(error, "_ronde_recorded", False):
            write_error_file(path, error)
            return True
        return os.path.getsize(path) > 0  # written, perhaps, by the user's code
    except Exception:  # the disk, or the text of the exception, which is the user's code
        return None


def announce_departure() -> None:
    """Tell the launcher that this process leaves the other ranks. Does nothing in a forked child."""
    if _hook.pid == os.getpid():
        _announce("left")


def announce_joining(size: int, epoch: int) -> None:
    """Tell the launcher that this process will wait for the other ranks of this epoch's world, `size` in all."""
    _announce("joins", f" {size} {epoch}")


def announce_joined() -> None:
    """Tell the launcher that this process does not wait for the other ranks any more: they have met, or it gives up."""
    _announce("joined")


def _announce(what: What, details: str = "") -> None:
    variables = environment()  # a copy of all, which is slow
    fd = _descriptor(variables)
    if fd is not None:
        with contextlib.suppress(OSError):
            place = f"{variables.get('RANK', '')}@{variables.get('RONDE_ROUND', '')}"
            os.write(fd, f"{place} {what}{details}\n".encode())


def mark_recorded(error: BaseException) -> None:
    """Note that the error file has this exception, perhaps written by the user's code."""
    error._ronde_recorded = True  # type: ignore[attr-defined]


def _descriptor(variables: Mapping[str, str]) -> int | None:
    """Return the worker's end of the pipe, and make it non-inheritable; None if this process has none."""
    identity = variables.get(_VARIABLE, "")
    try:
        fd = int(identity.partition(":")[0])
        if _identify(fd) != identity:
            return None
        os.set_inheritable(fd, False)
    except (ValueError, OSError):
        return None
    return fd


# The decorator `record`


P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writes an exception into the error file that the launcher has named, if one has.

    What `record` uses; derive from it to do something else. torch's class of that name has the same two methods.
    """

    def initialize(self) -> None:
        """Prepare for exceptions to come: a fatal signal prints where each thread was."""
        try:
            faulthandler.enable(all_threads=True)
        except (OSError, ValueError, RuntimeError, AttributeError):
            pass  # standard error is not a file

    def record_exception(self, error: BaseException) -> None:
        """Write the error file. What goes wrong with it is printed: the exception itself matters more."""
        path = environment().get(ERROR_FILE)
        if not path:
            return
        try:
            write_error_file(path, error)
        except OSError as problem:
            print(f"ronde: cannot write the error file {path}: {problem.strerror}", file=sys.stderr)


@overload
def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R]: ...


@overload
def record(
    fn: None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def record(
    fn: Callable[..., Any] | None = None, error_handler: ErrorHandler | None = None
) -> Callable[..., Any]:
    """Return a function that reports an exception of `fn` to the launcher, which names it as the cause of a failure.

        @ronde.record
        def main(): ...

    The exception continues as before; SystemExit is not reported. Without a launcher there is no report. Scripts that
    call `ronde.init()` do not need it. Raises no error.

    Args:
        fn: the main function of a script (None: return a decorator, for `@ronde.record(error_handler=...)`).
        error_handler: what to do with an exception (None: write the launcher's error file).
    """
    if fn is None:
        return functools.partial(record, error_handler=error_handler)
    handler = error_handler or ErrorHandler()

    @functools.wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        handler.initialize()
        announce_uncaught()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            handler.record_exception(error)
            mark_recorded(error)
            raise

    return recorded
