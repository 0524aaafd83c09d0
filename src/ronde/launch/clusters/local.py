"""A cluster that is this machine: each task is a process. For tests, and to try a job before it goes to a platform.

As a program, it is one task, which reads its ticket from standard input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.clusters.cluster import Capabilities, Capacity, SlotEvents, Ticket

__all__ = ["PROGRAM", "LocalCluster"]

PROGRAM = (sys.executable, "-P", "-m", "ronde.launch.clusters.local")


class LocalCluster:
    """`slots` processes at a time on this machine, with the module path of this process.

    Further tasks wait for one to end. `command`: another command that runs this program, such as one by ssh.
    """

    def __init__(self, slots: int, command: Sequence[str] = PROGRAM) -> None:
        if slots < 1:
            raise UsageError(f"slots={slots} is invalid: expected at least 1")
        self.name = "this machine"
        self.capabilities = Capabilities(elastic=True, gang=False)
        self._slots, self._command = slots, command
        self._lock = threading.Lock()
        self._queue: deque[tuple[Ticket, SlotEvents]] = deque()
        self._running: set[subprocess.Popen[bytes]] = set()

    def capacity(self) -> Capacity:
        """Return how many processes may run, and how many more than now."""
        with self._lock:
            return Capacity(self._slots, self._slots - len(self._running))

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Start a process for each ticket, as far as there are slots."""
        with self._lock:
            self._queue.extend((ticket, events) for ticket in tickets)
            self._start_tasks()

    def cancel(self, reason: str) -> None:
        """Kill all processes and forget those that wait."""
        with self._lock:
            self._queue.clear()
            for process in self._running:
                process.kill()

    def _start_tasks(self) -> None:
        while self._queue and len(self._running) < self._slots:
            ticket, events = self._queue.popleft()
            process = subprocess.Popen(
                self._command,
                env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            self._running.add(process)
            threading.Thread(target=self._follow, args=(process, ticket, events), daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes], ticket: Ticket, events: SlotEvents) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickle.dumps(ticket))
        code = process.wait()
        with self._lock:
            self._running.remove(process)
            self._start_tasks()
        events.slot_ended(ticket.slot, f"its process ended with exit code {code}" if code else "")


def _main() -> None:
    from ronde.launch.driver.task import run_task

    run_task(pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    _main()
