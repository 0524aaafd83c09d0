"""A program, not a module: becomes the command that follows, which the kernel kills when our parent dies.

    python -I -S die_with_parent.py PARENT_PID CORES COMMAND [ARGUMENT]...

The program start_worker (cpp/start_worker.cc) does the same, faster, where it was built.

CORES are numbers with commas between them, to which the command is bound, or "any". COMMAND is a path. This runs
between fork and exec of every worker, as a program of its own because Python code between the two is unsafe where
threads run. The wish to die with the parent survives exec. It is bound to the *thread* that forked: the launcher starts
workers from its main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_START = 126

if __name__ == "__main__":
    parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could say so
        os.kill(os.getpid(), signal.SIGKILL)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and exec would pass that on
        signal.signal(ignored, signal.SIG_DFL)
    try:
        if cores != "any":
            os.sched_setaffinity(0, map(int, cores.split(",")))
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.exit(CANNOT_START)
