"""Notices workers that somebody has stopped (SIGSTOP, Ctrl-Z in a debugger). They are alive, so they are waited for.

A stopped process tells nobody, so this looks once in a while: one short file of /proc for each worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ronde.launch.loop import Loop

__all__ = ["FrozenWatch"]

LEAST_NS = 10**9  # between two looks: who is frozen, is so for longer


class FrozenWatch:
    """Looks at the workers between `begin` and `end`, and says once when one is stopped, and when it goes on."""

    def __init__(self, loop: Loop, interval_ns: int, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._interval_ns = max(LEAST_NS, interval_ns)
        self._say = say
        self._frozen: set[int] = set()

    def begin(self, pids: Callable[[], Mapping[int, int]]) -> None:
        """Look at these processes from now on; `pids` gives those that run, by rank."""
        self._pids = pids
        self._frozen.clear()
        self._set_timer()

    def end(self) -> None:
        """Look at nobody any more."""
        self._loop.set_timer(self, None, self._look)

    def _set_timer(self) -> None:
        self._loop.set_timer(self, time.monotonic_ns() + self._interval_ns, self._look)

    def _look(self) -> None:
        for rank, pid in self._pids().items():
            stopped = _state(pid) == b"T"
            if stopped and rank not in self._frozen:
                now = time.strftime("%H:%M:%S")
                self._say(
                    f"rank {rank} (pid {pid}) has been stopped by a signal, seen at {now}; it is waited for, and "
                    f"kill -CONT {pid} lets it go on"
                )
                self._frozen.add(rank)
            elif not stopped and rank in self._frozen:
                self._say(f"rank {rank} (pid {pid}) goes on")
                self._frozen.discard(rank)
        self._set_timer()


def _state(pid: int) -> bytes:
    """Return the letter of the state of a process, nothing if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""
