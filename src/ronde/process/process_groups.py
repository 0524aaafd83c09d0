"""Processes of this machine: each starts in a new session, is watched by a pidfd, and ends with its whole group.

A pidfd becomes readable as soon as its process ends. The group of a process is everything that it started and that did
not leave (setsid, a daemon). A group exists while one member does, and the kernel does not reuse its number until then.

When a launcher dies, the kernel kills its workers (`die_with_parent.py`), but not the processes that they started: the
training under a shell script, the loaders of a data set. `Guard` ends them: a shell reads a pipe that only the launcher
holds open, which brings it each new group (`+4711`) and each ended one (`-4711`); when the pipe ends, the shell kills
the groups that are left. Processes that left their group stay.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import IO

import ronde.process

__all__ = [
    "GroupLeader",
    "Guard",
    "Process",
    "is_in_background",
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


def is_in_background(fd: int) -> bool:
    """Return whether the descriptor is this process's terminal, but another job is in its foreground.

    The kernel stops a background job that reads, but not workers, because they have other sessions.
    """
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:
        return False  # not a terminal, or not the controlling one


_SHELL = "/bin/sh"
LAST_WAIT_S = 5  # how long a killed process may take to end; on a hung mount it does not
_SCRIPT = """\
trap '' HUP INT QUIT TERM
groups=' '
while read -r line; do
    group=${line#?}
    case $line in
    +*) groups="$groups$group " ;;
    -*) case $groups in *" $group "*) groups="${groups%%" $group "*} ${groups#*" $group "}" ;; esac ;;
    esac
done
for group in $groups; do kill -KILL "-$group"; done
[ -z "$1" ] || rm -rf -- "$1"
"""


class Guard:
    """A shell that outlives a killed launcher. Its own errors are ignored. Close it.

    It also removes the directory `temporary`, if there is one.
    """

    def __init__(self, temporary: str = "") -> None:
        self._temporary = temporary
        self._groups: set[int] = set()
        self._unwritten = b""  # data that the pipe has not taken yet
        self._shell: subprocess.Popen[bytes] | None = None
        if temporary:
            self._tell("")

    def add(self, group: int) -> None:
        """Guard this group."""
        if group not in self._groups:
            self._groups.add(group)
            self._tell(f"+{group}\n")

    def discard(self, group: int) -> None:
        """Stop guarding a group that is gone, whose number may be used again."""
        if group in self._groups:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the shell without killing any group."""
        if self._shell is not None:
            self._shell.kill()  # before its pipe ends, because then it kills the groups
            assert self._shell.stdin is not None
            self._shell.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(timeout=LAST_WAIT_S)

    def _tell(self, line: str) -> None:
        self._unwritten += line.encode()
        with contextlib.suppress(OSError):  # no process can start, or the shell has ended or is stopped
            if self._shell is None:
                self._shell = subprocess.Popen(
                    [_SHELL, "-c", _SCRIPT, "guard of ronde", self._temporary],
                    env={"PATH": "/usr/bin:/bin"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                )
                assert self._shell.stdin is not None
                os.set_blocking(self._shell.stdin.fileno(), False)
            assert self._shell.stdin is not None
            # The next call writes the rest.
            self._unwritten = self._unwritten[os.write(self._shell.stdin.fileno(), self._unwritten) :]
