"""Ends whole process groups after a launcher that was killed.

The kernel kills the workers of a launcher that dies (`die_with_parent.py`), but not what these have started: the
training under a shell script, the loaders of a data set. A shell waits at a pipe that only the launcher holds open;
when that ends, it kills the groups that it was last told of. What has left its group on purpose (setsid) stays.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

__all__ = ["Guard"]

_SHELL = "/bin/sh"
_SCRIPT = """\
trap '' HUP INT QUIT TERM
while read -r line; do groups=$line; done
for group in $groups; do kill -KILL "-$group"; done
[ -z "$1" ] || rm -rf -- "$1"
"""


class Guard:
    """A shell that outlives us, if we are killed. Whatever goes wrong with it is no harm. Close it.

    It then also removes the directory `temporary`, if there is one.
    """

    def __init__(self, temporary: str = "") -> None:
        self._temporary = temporary
        self._groups: set[int] = set()
        self._shell: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Guard this group."""
        self._groups.add(group)
        self._tell()

    def discard(self, group: int) -> None:
        """Guard the group no longer, since it is gone: its number may soon be somebody else's."""
        self._groups.discard(group)
        self._tell()

    def close(self) -> None:
        """Let the shell go; nobody is guarded any more."""
        if self._shell is not None:
            self._shell.kill()  # before its pipe ends, which would be the sign
            with self._shell:  # closes the pipe and waits
                pass

    def _tell(self) -> None:
        line = " ".join(map(str, sorted(self._groups)))
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
            os.write(self._shell.stdin.fileno(), f"{line}\n".encode())
