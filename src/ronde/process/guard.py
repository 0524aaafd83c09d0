"""Ends the process groups of a killed launcher.

When a launcher dies, the kernel kills its workers (`die_with_parent.py`), but not the processes that they started: the
training under a shell script, the loaders of a data set. A shell reads a pipe that only the launcher holds open, which
brings it each new group (`+4711`) and each ended one (`-4711`); when the pipe ends, the shell kills the groups that are
left. Processes that left their group (setsid) stay.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

__all__ = ["Guard"]

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
