"""The first process of a container inherits every orphan there, and should reap them.

What nobody reaps keeps its number for ever, until no process can be started any more. Who supervises cannot do it on
the side without taking the status of its own children away. So where we are that process, a child does the work, and
this one only reaps and passes on signals, which the kernel would keep from the first process where it does not heed
them.
"""

from __future__ import annotations

import os
import signal

__all__ = ["leave_work_to_child"]

# Those of the kernel for the process itself, and those by which a terminal holds on.
_OUR_OWN = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT, signal.SIGPIPE, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip


def leave_work_to_child() -> int | None:
    """Fork. Return None in the child, at once, and its exit code in the parent, when it has ended.

    To be called before there are threads.
    """
    passed_on = signal.valid_signals() - _OUR_OWN
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would reap the child, too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *passed_on})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    while (code := _reap(child)) is None:
        came = signal.sigwaitinfo({signal.SIGCHLD, *passed_on})
        # What is typed at a terminal the child gets, too; of its end only we hear.
        if came.si_signo in passed_on and (came.si_code <= 0 or came.si_signo == signal.SIGHUP):
            os.kill(child, came.si_signo)
    return code


def _reap(child: int) -> int | None:
    """Reap whoever has ended. Return the exit code of the child if that was among them."""
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
