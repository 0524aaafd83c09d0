"""Reports workers that a signal has stopped (SIGSTOP, Ctrl-Z in a debugger). They live, so the job waits for them.

The kernel does not announce a stopped process, so this reads a short file of /proc for each worker now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ronde.launch.loop import Loop

__all__ = ["FrozenWatch"]

LEAST_NS = 10**9  # the shortest interval between two looks


class FrozenWatch:
    """Reports once when a worker is stopped, and when it goes on, between `watch_processes` and `stop_watching`."""

    def __init__(self, loop: Loop, interval_ns: int, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._interval_ns = max(LEAST_NS, interval_ns)
        self._say = say
        self._frozen: set[int] = set()

    def watch_processes(self, pids: Callable[[], Mapping[int, int]]) -> None:
        """Watch these processes from now on; `pids` returns those that run, by rank."""
        self._pids = pids
        self._frozen.clear()
        self._set_timer()

    def stop_watching(self) -> None:
        """Stop watching."""
        self._loop.set_timer(self, None, self._check_processes)

    def _set_timer(self) -> None:
        self._loop.set_timer(self, time.monotonic_ns() + self._interval_ns, self._check_processes)

    def _check_processes(self) -> None:
        for rank, pid in self._pids().items():
            stopped = _state(pid) == b"T"
            if stopped and rank not in self._frozen:
                now = time.strftime("%H:%M:%S")
                self._say(
                    f"rank {rank} (pid {pid}) is stopped by a signal (noticed at {now}), and the job waits for it: "
                    f"kill -CONT {pid} continues it"
                )
                self._frozen.add(rank)
            elif not stopped and rank in self._frozen:
                self._say(f"rank {rank} (pid {pid}) continues")
                self._frozen.discard(rank)
        self._set_timer()


def _state(pid: int) -> bytes:
    """Return the letter of the state of a process, empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""
