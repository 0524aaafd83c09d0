"""Processes of this machine: each starts in a new session, is watched by a pidfd, and ends with its whole group.

A pidfd becomes readable as soon as its process ends. The group of a process is everything that it started and that did
not leave (setsid, a daemon). A group exists while one member does, and the kernel does not reuse its number until then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO, Any

import ronde.process
from ronde.errors import UsageError
from ronde.net.addresses import LOOPBACK_REMEDY, is_loopback
from ronde.process.guard import Guard

__all__ = [
    "INTERRUPTS",
    "GroupLeader",
    "Process",
    "SignalInbox",
    "free_port",
    "is_in_background",
    "usable_cores",
]


def _starter() -> tuple[str, ...]:
    """Return the command that starts a worker; a slower one in Python where start_worker was not built."""
    # An editable install has two folders: one with the built programs, one with the sources.
    for folder in ronde.process.__path__:
        program = os.path.join(folder, "start_worker")
        if os.access(program, os.X_OK):
            return (program,)
    return (sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "die_with_parent.py"))


_STARTER = _starter()
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class GroupLeader(ABC):
    """A running process that leads its own session and process group.

    `stdout` and `stderr` are the reading ends of its pipes, which the reader closes; None if it writes elsewhere.
    `pidfd` becomes readable when the process has ended, and then `reap()` is to be called, once.
    """

    pid: int
    pidfd: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    guard: Guard | None = None  # the guard that knows this group

    @abstractmethod
    def reap(self) -> int:
        """Return the exit code, or minus the signal that killed it; only after the pidfd has become readable."""

    def signal_group(self, signum: int) -> None:
        """Send the signal to every process of the group, if any is left."""
        # No process is left, or only some of another user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def open_group(self) -> list[int]:
        """Return a pidfd of every living process in the group; the caller closes them.

        Call this after `reap()`. If there is none, the group is gone and no longer guarded.
        """
        pidfds = []
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            if self.guard is not None:
                self.guard.discard(self.pid)
            return []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            if _living_in_group(pid) == self.pid:
                try:
                    pidfds.append(os.pidfd_open(pid))
                except ProcessLookupError:
                    continue
        return pidfds


class Process(GroupLeader):
    """A command, started with an empty standard input unless `keep` contains 0.

    `argv[0]`: a path. `environment`: the whole environment. `stdout`, `stderr`: the descriptors to which it writes;
    None: a pipe to this process. `keep`: further descriptors that it inherits under their numbers. `cores`: those on
    which it may run; None: those of this process. The kernel kills the process when the *thread* that called this ends,
    even by kill -9. Raises OSError if no further process can start.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        keep: Sequence[int] = (),
        cores: Collection[int] | None = None,
    ) -> None:
        allowed = "any" if cores is None else ",".join(map(str, sorted(cores)))
        self._popen = subprocess.Popen(
            [*_STARTER, str(os.getpid()), allowed, *argv],
            env=environment,
            stdin=None if 0 in keep else subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE if stderr is None else stderr,
            pass_fds=keep,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.stdout, self.stderr = self._popen.stdout, self._popen.stderr
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._popen.kill()
            with self._popen:  # closes the pipes and waits
                raise

    def reap(self) -> int:
        """Return the exit code, or minus the signal that killed it; only after the pidfd has become readable."""
        os.close(self.pidfd)
        return self._popen.wait()


def _living_in_group(pid: int) -> int | None:
    """Return the process group of a living process; None for a dead one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # "pid (command) state parent group ...", where the command may contain anything
    state, _parent, group = text.rpartition(b")")[2].split()[:3]
    return None if state in b"ZX" else int(group)


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
            signum: signal.signal(signum, _heed)
            for signum in self._signums
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor to select for reading."""
        return self._reader.fileno()

    def has_mail(self) -> bool:
        """Return whether `read` would return a signal. Discards those of other handlers."""
        try:
            while came := self._reader.recv(4096, socket.MSG_PEEK):
                if any(signum in self._old_handlers for signum in came):
                    return True
                self._reader.recv(len(came))
        except BlockingIOError:
            pass
        return False

    def read(self) -> list[int]:
        """Return the signals that came since the last call, in their order."""
        try:
            return [signum for signum in self._reader.recv(4096) if signum in self._old_handlers]
        except BlockingIOError:
            return []


def _heed(signum: int, frame: FrameType | None) -> None:
    """Do nothing; the wakeup descriptor has the signal."""


def is_in_background(fd: int) -> bool:
    """Return whether the descriptor is this process's terminal, but another job is in its foreground.

    The kernel stops a background job that reads, but not workers, because they have other sessions.
    """
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:
        return False  # not a terminal, or not the controlling one


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(usable_core_numbers())


def usable_core_numbers() -> set[int]:
    """Return the cores on which this process may run; all cores if the kernel or a container does not tell."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set(range(os.cpu_count() or 1))


def free_port(address: str) -> int:
    """Return a TCP port that is free at this numeric address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            hint = f": {LOOPBACK_REMEDY}" if is_loopback(address) else ""
            raise UsageError(f"this machine has no address {address} ({error.strerror}){hint}") from None
        port: int = probe.getsockname()[1]
    return port
