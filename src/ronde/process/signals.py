"""The signals that reach a launcher: those that it handles, those that kill it, and those of a whole container.

`SignalInbox` makes signals readable from a descriptor. `explain_deadly_signals` says by which signal this process dies,
where the signal's default action kills it without a word: schedulers announce preemption by such signals, and Slurm's
`--signal=USR1` reaches `ronde run` like any other process.

The first process of a container inherits the orphans of all others. Unreaped processes keep their numbers until no
process can start, but a launcher that reaped orphans would also take the status of its own children. So
`leave_work_to_child` lets a child do the work of the first process, which only reaps, and passes on signals; the kernel
drops those that the first process does not handle.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any

__all__ = [
    "INTERRUPTS",
    "SignalInbox",
    "explain_deadly_signals",
    "leave_work_to_child",
]

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEADLY = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGXCPU, signal.SIGXFSZ, signal.SIGIO, signal.SIGPWR),
)


class SignalInbox:
    """While it is open, some signals (Ctrl-C, SIGTERM, ...) make a descriptor readable and do nothing else.

    A hang-up that nohup made this process ignore stays ignored. Python handles signals in the main thread; in any other
    thread this receives none.
    """

    def __init__(self, signums: Collection[int] = INTERRUPTS) -> None:
        self._signums = signums

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_handlers: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {
            signum: signal.signal(signum, _do_nothing)
            for signum in self._signums
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor to select for reading."""
        return self._reader.fileno()

    def has_signals(self) -> bool:
        """Return whether `read` would return a signal. Discards those of other handlers."""
        try:
            while received := self._reader.recv(4096, socket.MSG_PEEK):
                if any(signum in self._old_handlers for signum in received):
                    return True
                self._reader.recv(len(received))
        except BlockingIOError:
            pass
        return False

    def read(self) -> list[int]:
        """Return the signals that came since the last call, in their order."""
        try:
            return [signum for signum in self._reader.recv(4096) if signum in self._old_handlers]
        except BlockingIOError:
            return []


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Leave the signal to the reader of the wakeup descriptor."""


def explain_deadly_signals(handled: Collection[int]) -> None:
    """Let this process print a line before it dies by a signal that is neither `handled` otherwise nor ignored."""
    for signum in _DEADLY:
        if signum not in handled and signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _explain)


def _explain(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum).name
    line = f"ronde: killed by {name}; --signals-to-handle {name} passes it on to the workers, which may save state\n"
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
    except OSError:
        pass  # standard error is closed
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


# The first process of a container


# Signals of the kernel to the process itself, and those by which a terminal stops it.
_NOT_PASSED_ON = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT, signal.SIGPIPE, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip


def leave_work_to_child() -> int | None:
    """Fork. Return None in the child, and in the parent the exit code of the child at its end.

    Call this before there are threads.
    """
    passed_on = signal.valid_signals() - _NOT_PASSED_ON
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # SIG_IGN would reap the child, too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *passed_on})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    while (code := _reap(child)) is None:
        came = signal.sigwaitinfo({signal.SIGCHLD, *passed_on})
        # The terminal sends typed signals to the child, too, but SIGHUP only to this process.
        if came.si_signo in passed_on and (came.si_code <= 0 or came.si_signo == signal.SIGHUP):
            os.kill(child, came.si_signo)
    return code


def _reap(child: int) -> int | None:
    """Reap all ended processes. Return the exit code of the child if it is one of them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
