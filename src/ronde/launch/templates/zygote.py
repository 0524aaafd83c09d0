"""A program, not a module: a process that has imported what a script needs, and becomes a worker by forking.

    python [options] zygote.py CONTROL_FD MODULE[,MODULE]...|? SCRIPT|-m MODULE [ARGUMENT]...

CONTROL_FD and the modules to import (?: those that the script's text names) precede the workers' command, so `ps` shows
that, too. `ronde.launch.templates.template` starts this program and holds the other end of CONTROL_FD, a socket for
these messages:

    zygote -> launcher   R and a summary after the imports; or N and why this process cannot be a template
    launcher -> zygote   a memory file with the pickled request, stdout, stderr, the status pipe, descriptors to keep
    worker -> launcher   S and the worker's process id
    zygote -> launcher   E and why there is no worker

1. No thread may run at a fork: the child would lack it, and inherit the locks that it held. A trial fork finds out
   whether libraries (OpenBLAS) end their threads before a fork.
2. A worker finds the same as in a new process: arguments, paths, environment, main module, the interpreter's end. Two
   things differ: all workers have the same seed of string hashes, and `ps` shows this program.
3. The zygote waits for its workers and writes each one's status into its pipe. Workers die with the zygote, which dies
   with the launcher, so an early end of the pipe means that the worker was killed.
4. Before the fork it uses only the standard library, and the modules to import.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import time
import types
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
MOST_KEPT = 249  # Linux passes 253 descriptors at once
# Variables by which a library starts no thread when it is imported.
# PyArrow's allocator returns memory without a thread.
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_libc = ctypes.CDLL(None, use_errno=True)


def folder_of(command: list[str]) -> str:
    """Return sys.path[0] of a new process with this command."""
    return os.getcwd() if command[0] == "-m" else os.path.dirname(os.path.realpath(command[0]))


def import_modules(wanted: str, command: list[str]) -> str:
    """Import the modules; return a summary."""
    started = time.monotonic()
    for name, value in WITHOUT_THREADS.items():  # a worker gets the variables of its request
        os.environ.setdefault(name, value)
    if wanted != "?":
        names = wanted.split(",")
    elif command[0] == "-m":
        path = os.path.join(folder_of(command), *command[1].split("."))
        names = _names(f"{path}.py" if os.path.isfile(f"{path}.py") else os.path.join(path, "__main__.py"))
    else:
        names = _names(command[0])
    failed = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # the worker's import will raise it again
            failed.append(name)
    without = f" without {', '.join(failed)}" if failed else ""
    return f"{len(names) - len(failed)} modules{without} in {time.monotonic() - started:.1f} s"


def _names(script: str) -> list[str]:
    """Ask preload.py, without making it a module that a script could find."""
    find = runpy.run_path(os.path.join(os.path.dirname(__file__), "preload.py"))["modules_to_preload"]
    names: list[str] = find(script)
    return names


def why_unfit() -> str:
    """Return why this process cannot fork safely; empty if it can."""
    trial = os.fork()
    if not trial:
        os._exit(0)
    os.waitpid(trial, 0)
    if threads := _further_threads():
        return f"the imports have started threads, which a worker would lack: {', '.join(threads)}"
    if signal.set_wakeup_fd(-1) != -1:
        return "the imports have set a wakeup descriptor for signals, which all workers would share"
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return ""
    return "the imports have started a process"


def _further_threads() -> list[str]:
    """Return the names of the threads beside this one."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                names += [file.read().strip()] if int(thread) != os.getpid() else []
        except OSError:
            pass  # it has just ended
    return names


class Zygote:
    """Forks workers on request."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._workers: dict[int, tuple[int, int]] = {}  # by pidfd: the process id and the status pipe

    def fork_workers(self) -> dict[str, Any]:
        """Fork a worker for each request; return in the worker, with its request."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._control.fileno():
                    self._ended(fd)
                elif request := self._answer():
                    return request

    def _ended(self, pidfd: int) -> None:
        pid, status = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            os.write(status, code.to_bytes(4, "little", signed=True))
        except BrokenPipeError:
            pass  # the launcher no longer reads it
        os.close(status)

    def _answer(self) -> dict[str, Any] | None:
        data, fds, _, _ = socket.recv_fds(self._control, 1, 4 + MOST_KEPT)
        if not data:
            os._exit(0)
        body, stdout, stderr, status, *kept = fds
        with open(body, "rb") as file:
            request: dict[str, Any] = pickle.load(file)
        zygote = os.getpid()
        try:
            self._check_room(request["keep"], fds)
            pid = os.fork()
        except OSError as error:
            self._control.send(f"E{error.strerror or error}".encode())
            for fd in (stdout, stderr, status, *kept):
                os.close(fd)
            return None
        if pid == 0:
            self._become(zygote, request, (stdout, stderr, status), kept)
            return request
        for fd in (stdout, stderr, *kept):
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid, status
        self._poll.register(pidfd, select.POLLIN)
        return None

    def _check_room(self, numbers: list[int], received: list[int]) -> None:
        """Raise OSError if a module has opened a descriptor with a number that the worker needs."""
        ours = {self._control.fileno(), *received, *self._workers}
        ours |= {status for _, status in self._workers.values()}
        for number in set(numbers) - ours - {0}:  # this process has no use for standard input
            if os.path.exists(f"/proc/self/fd/{number}"):
                raise OSError(f"the imports have opened descriptor {number}")

    def _become(
        self, zygote: int, request: dict[str, Any], ours: tuple[int, int, int], kept: list[int]
    ) -> None:
        """Become a worker: leave the zygote's process group, but die with it."""
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os.kill(os.getpid(), signal.SIGKILL)
        for pidfd, (_, status) in self._workers.items():
            os.close(pidfd)
            os.close(status)
        for fd, number in zip(ours, (1, 2)):
            os.dup2(fd, number)
        for fd in ours:
            os.close(fd)
        self._control.send(b"S%d" % os.getpid())
        self._control.close()
        # First above all wanted numbers, so that none overwrites another.
        above = max(request["keep"], default=0) + 1
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in kept]
        for fd in kept:
            os.close(fd)
        for fd, number in zip(moved, request["keep"]):
            os.dup2(fd, number)
            os.close(fd)
        if request["cores"] is not None:
            os.sched_setaffinity(0, request["cores"])
        if os.environ != request["environment"]:
            os.environ.clear()
            os.environ.update(request["environment"])
        time.tzset()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # else all workers draw the same random numbers


def run_command(request: dict[str, Any]) -> None:
    """Run the command as the interpreter does."""
    command: list[str] = request["command"]
    sys.orig_argv[:] = request["argv"]
    if not sys.flags.safe_path:
        sys.path[0] = folder_of(command)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if "__annotations__" in sys.modules["__main__"].__dict__:  # depends on the version of Python
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]  # as `python -m` does
        return
    sys.argv[:] = command
    path = os.path.join(os.getcwd(), command[0])
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with open(path, "rb") as file:
        text = file.read()
    exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)


def end_by_exception(error: BaseException) -> NoReturn:
    """End as the interpreter does after an uncaught exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # it has been shown
        raise error  # the interpreter ends, and then this process dies by SIGINT
    sys.exit(1)


if __name__ == "__main__":
    ourselves = sys.modules["__main__"]  # keeps this module alive when another one takes its place
    control_fd, modules, *words = sys.argv[1:]
    if not sys.flags.safe_path:
        sys.path[0] = folder_of(words)
    control_socket = socket.socket(fileno=int(control_fd))
    control_socket.set_inheritable(False)
    summary = import_modules(modules, words)
    reason = why_unfit()
    control_socket.send((f"N{reason}" if reason else f"R{summary}").encode())
    if reason:
        os._exit(0)
    gc.collect()
    gc.freeze()  # collections in the workers then leave shared pages alone
    request = Zygote(control_socket).fork_workers()
    try:
        run_command(request)
    except SystemExit:
        raise
    except BaseException as caught:
        end_by_exception(caught)
