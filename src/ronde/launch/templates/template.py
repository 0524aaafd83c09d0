"""A template of workers: a process that has done their imports, and forks (`zygote.py`).

It spares restarted workers their imports. The template serves commands that run Python on a script or module. If it is
unfit (its imports start threads), slow or broken, the caller starts a new process instead. This process can keep one
template for its next job, whose first workers then need no imports either.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from ronde.process.process_groups import GroupLeader, Process
from ronde.process.signals import SignalInbox

__all__ = [
    "Template",
    "close_kept_template",
    "command_of",
    "keep_template",
    "take_template",
]

_PROGRAM = os.path.join(os.path.dirname(__file__), "zygote.py")
START_NS = 15 * 10**9  # how long a fork may take on a busy machine
LAST_WAIT_NS = 5 * 10**9  # how long a killed template may take to end
# Variables that the interpreter or a library reads at its start, so a fork cannot have other values.
_READ_EARLY = re.compile(
    r"PYTHON|LD_|(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB|MALLOC)_|GLIBC_TUNABLES$"
)
_WITH_VALUE = ("-W", "-X")
_OF_ONE_WORKER = ("RANK", "LOCAL_RANK", "ROLE_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "RONDE_JOB_KEY")


def command_of(argv: Sequence[str]) -> int | None:
    """Return the index of the script, or of -m, in a Python command line; None for any other command.

    The words before it are options of the interpreter.
    """
    if argv[0] != sys.executable:
        return None
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-m":
        if argv[at].startswith(("-c", "-i", "--")) or argv[at] == "-":
            return None
        at += 2 if argv[at] in _WITH_VALUE else 1
    if at < len(argv) and argv[at] == "-m":
        return at if at + 1 < len(argv) else None
    return at if at < len(argv) and argv[at].endswith(".py") else None


class Template:
    """A process that becomes workers.

    `argv`: a worker's command, for which `command_of` is not None. `environment`: a worker's. `modules`: those to
    import; None: the large ones that the script's text names. `begun_ns`: its start, by `time.monotonic_ns()`. Raises
    OSError if the process cannot start. It dies with the thread that makes it; close it when no worker needs it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        modules: Sequence[str] | None = None,
    ) -> None:
        at = command_of(argv)
        assert at is not None
        self._at = at
        self._same = list(argv[: at + 1])  # the first words of all commands that it serves
        self._environment = {name: value for name, value in environment.items() if name not in _OF_ONE_WORKER}
        self._modules = modules
        self._surroundings = _surroundings()
        self._ready = False
        self.begun_ns = time.monotonic_ns()
        self.problem = ""  # why it cannot be used, if so
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wanted = "?" if modules is None else ",".join(modules)
        command = [*argv[:at], _PROGRAM, str(theirs.fileno()), wanted, *argv[at:]]
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._process: GroupLeader = Process(
                command, self._environment, stdout=nothing, stderr=nothing, keep=[theirs.fileno()]
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(nothing)

    def is_ready(self, deadline_ns: int = 0, signals: SignalInbox | None = None) -> bool:
        """Return whether it can fork now.

        Waits until the deadline (of `time.monotonic_ns()`), or until one of the `signals` comes.
        """
        while not (self._ready or self.problem):
            try:
                message = self._receive(deadline_ns, signals)
            except InterruptedError:
                return False
            if message is None:
                return False
            self._ready = message.startswith("R")
            if not self._ready:
                self._give_up(message[1:] or "it has ended")
        return self._ready

    def can_serve(
        self, argv: Sequence[str], environment: Mapping[str, str], modules: Sequence[str] | None
    ) -> bool:
        """Return whether a template that has served a job can serve another one with these imports, too."""
        if self._ready and self._receive(0) is not None:
            self._give_up("it has ended")
        same = self._modules == modules and self._surroundings == _surroundings()
        return self._ready and same and self._fits(argv, environment)

    def start_worker(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        keep: Sequence[int] = (),
        cores: Collection[int] | None = None,
        signals: SignalInbox | None = None,
    ) -> GroupLeader | None:
        """Fork a worker and return it, as `Process` does; None if the template cannot, now or ever (`problem`).

        Raises InterruptedError if one of the `signals` comes before the fork: then there is no worker, and the template
        can no longer be used.
        """
        if not self._fits(argv, environment) or not self.is_ready():
            return None
        request = {
            "argv": list(argv),
            "command": list(argv[self._at :]),
            "environment": dict(environment),
            "keep": list(keep),
            "cores": None if cores is None else set(cores),
        }
        worker = _Forked(stdout, stderr)
        try:
            with _memory_file(pickle.dumps(request)) as body:
                fds = [body.fileno(), *worker.worker_ends, *keep]
                socket.send_fds(self._control, [b"F"], fds)
            answer = self._receive(time.monotonic_ns() + START_NS, signals)
        except InterruptedError:
            worker.close_worker_ends()
            worker.close()
            self._give_up("it had not forked when a signal came")
            raise
        except OSError as error:
            answer = f"E{error.strerror or error}"
        worker.close_worker_ends()
        if answer is not None and answer.startswith("S"):
            worker.pid = int(answer[1:])
            return worker
        worker.close()
        self._give_up("it did not fork in time" if answer is None else answer[1:] or "it has ended")
        return None

    def _fits(self, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
        if list(argv[: self._at + 1]) != self._same:
            return False
        names = set(environment) | set(self._environment)
        return all(
            environment.get(name) == self._environment.get(name) for name in names if _READ_EARLY.match(name)
        )

    def _receive(self, deadline_ns: int, signals: SignalInbox | None = None) -> str | None:
        """Return the next message, empty at the end of the connection; None if none comes until the deadline.

        Raises InterruptedError if one of the `signals` comes before.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if signals is not None:
            poll.register(signals, select.POLLIN)
        while ready := poll.poll(max(0, deadline_ns - time.monotonic_ns()) / 1e6):
            if self._control.fileno() in (fd for fd, _ in ready):
                break
            if signals is not None and signals.has_signals():
                raise InterruptedError
        else:
            return None
        try:
            return self._control.recv(4096).decode()
        except ConnectionError:
            return ""

    def _give_up(self, problem: str) -> None:
        # A late fork would be a second worker of the same rank; it dies with the template.
        self.problem, self._ready = problem, False
        self._process.signal_group(9)

    def leave_to_parent(self) -> None:
        """Let go of the template in a forked child, whose parent goes on to use it."""
        self._control.close()

    def close(self) -> None:
        """Kill the template and the workers that are left of it."""
        self._control.close()
        self._process.signal_group(9)
        poll = select.poll()
        poll.register(self._process.pidfd, select.POLLIN)
        if poll.poll(LAST_WAIT_NS / 1e6):  # a hung mount may hold even a killed process
            self._process.reap()


def _surroundings() -> tuple[object, ...]:
    """Return what a process inherits from this one besides its environment, as far as it matters to a worker."""
    texts = []
    for name in ("cgroup", "limits"):
        with open(f"/proc/self/{name}", encoding="utf-8") as file:
            texts.append(file.read())
    return os.readlink("/proc/self/cwd"), os.sched_getaffinity(0), *texts


class _Forked(GroupLeader):
    """A worker whose parent is the template. `pidfd` is the pipe into which the template writes its status."""

    def __init__(self, stdout: int | None, stderr: int | None) -> None:
        self.pid = 0
        self._made: list[int] = []  # ends of pipes that only the worker uses
        self.stdout, out = self._stream(stdout)
        self.stderr, err = self._stream(stderr)
        self.pidfd, status = os.pipe2(os.O_CLOEXEC)
        self._made.append(status)
        self.worker_ends = (out, err, status)

    def _stream(self, fd: int | None) -> tuple[IO[bytes] | None, int]:
        if fd is not None:
            return None, fd
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._made.append(writer)
        return os.fdopen(reader, "rb", buffering=0), writer

    def close_worker_ends(self) -> None:
        for fd in self._made:
            os.close(fd)

    def close(self) -> None:
        """Close the pipes of a worker that did not start."""
        os.close(self.pidfd)
        for pipe in (self.stdout, self.stderr):
            if pipe:
                pipe.close()

    def reap(self) -> int:
        """Return the exit code, or minus the signal of a killed worker. Call this once the pidfd is readable."""
        status = os.read(self.pidfd, 4)
        os.close(self.pidfd)
        return int.from_bytes(status, "little", signed=True) if status else -9  # it died with the template


def _memory_file(data: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("ronde", os.MFD_CLOEXEC), "w+b")
    file.write(data)
    file.flush()
    file.seek(0)
    return file


# The template that this process keeps for its next job, one at most. A template ends with the thread that made it, so
# only the main thread calls these.
_kept: list[Template] = []


def keep_template(template: Template) -> None:
    """Keep a template without workers for `take_template`, instead of the one that was kept before."""
    close_kept_template()
    _kept.append(template)


def take_template(
    argv: Sequence[str], environment: Mapping[str, str], modules: Sequence[str] | None
) -> Template | None:
    """Return the kept template, which the caller then owns; None if there is none that can fork such workers.

    `modules`: what they import. A template that cannot is closed.
    """
    if _kept and _kept[0].can_serve(argv, environment, modules):
        return _kept.pop()
    close_kept_template()
    return None


def close_kept_template() -> None:
    """End the kept template, if there is one."""
    while _kept:
        _kept.pop().close()


def _forget_in_child() -> None:
    while _kept:
        _kept.pop().leave_to_parent()


os.register_at_fork(after_in_child=_forget_in_child)
