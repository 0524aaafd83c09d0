"""Reaps the orphans of a container, if this is its first process, which inherits them.

Unreaped processes keep their numbers until no process can start. A supervisor that reaped orphans would also take the
status of its own children. So a child does the work of the first process, which only reaps, and passes on signals; the
kernel drops those that the first process does not handle.
"""

from __future__ import annotations

import os
import signal

__all__ = ["leave_work_to_child"]

# Signals of the kernel to the process itself, and those by which a terminal stops it.
_OUR_OWN = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT, signal.SIGPIPE, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip


def leave_work_to_child() -> int | None:
    """Fork. Return None in the child, and in the parent the exit code of the child at its end.

    Call this before there are threads.
    """
    passed_on = signal.valid_signals() - _OUR_OWN
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
