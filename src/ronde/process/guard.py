"""Ends whole process groups after a launcher that was killed.

The kernel kills the workers of a launcher that dies (`die_with_parent.py`), but not what these have started: the
training under a shell script, the loaders of a data set. A shell waits at a pipe that only the launcher holds open,
and hears of each group that comes (`+4711`) and goes (`-4711`); when the pipe ends, it kills those that are left. What
has left its group on purpose (setsid) stays.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

__all__ = ["Guard"]

_SHELL = "/bin/sh"
LAST_WAIT_S = 5  # for what has been killed: on a hung mount even that does not end it
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
    """A shell that outlives us, if we are killed. Whatever goes wrong with it is no harm. Close it.

    It then also removes the directory `temporary`, if there is one, also if we are killed before anybody is started.
    """

    def __init__(self, temporary: str = "") -> None:
        self._temporary = temporary
        self._groups: set[int] = set()
        self._unwritten = b""  # what it is still to hear
        self._shell: subprocess.Popen[bytes] | None = None
        if temporary:
            self._tell("")

    def add(self, group: int) -> None:
        """Guard this group."""
        if group not in self._groups:
            self._groups.add(group)
            self._tell(f"+{group}\n")

    def discard(self, group: int) -> None:
        """Guard the group no longer, since it is gone: its number may soon be somebody else's."""
        if group in self._groups:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let the shell go; nobody is guarded any more."""
        if self._shell is not None:
            self._shell.kill()  # before its pipe ends, which would be the sign
            assert self._shell.stdin is not None
            self._shell.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(timeout=LAST_WAIT_S)

    def _tell(self, line: str) -> None:
        self._unwritten += line.encode()
        with contextlib.suppress(OSError):  # no room for a process, or the shell has gone or been stopped
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
            # What does not fit is written the next time.
            self._unwritten = self._unwritten[os.write(self._shell.stdin.fileno(), self._unwritten) :]
