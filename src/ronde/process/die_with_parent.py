"""A program, not a module: becomes a command that the kernel kills when its parent dies.

    python -I -S die_with_parent.py PARENT_PID CORES COMMAND [ARGUMENT]...

The program start_worker (cpp/system/start_worker.cc) does the same faster; this one replaces it where it was not built.

CORES are the numbers of the cores to which the command is bound, with commas between them, or "any". COMMAND is a path.
This program runs between fork and exec of every worker, because Python code there is unsafe in a process with threads.
The request to die with the parent survives exec. It concerns the *thread* that forked: the launcher starts workers from
its main thread.
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
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), signal.SIGKILL)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # some platforms, such as Ray, block SIGINT in their processes
    try:
        if cores != "any":
            os.sched_setaffinity(0, map(int, cores.split(",")))
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.exit(CANNOT_START)
