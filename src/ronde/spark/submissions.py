"""Jobs or queries of Spark that are cancelled together. Each keeps a thread waiting until it ends."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence

__all__ = ["Submissions"]

FIRST_PAUSE_S, PAUSE_S = 0.2, 0.5  # before an interruption, for each thread
LONGEST_CANCEL_S = 60


class Submissions:
    """What a cluster has submitted since it was made, or since it was last cancelled.

    `name`: what Spark calls them together, the job group or the tag. `interrupt`: has Spark cancel all that runs under
    this name; returns whether the session still lives.
    """

    def __init__(self, interrupt: Callable[[str], bool]) -> None:
        self.name = f"ronde-{uuid.uuid4().hex}"
        self.is_cancelled = False
        self._interrupt = interrupt
        self._threads: list[threading.Thread] = []

    def start(self, threads: Sequence[threading.Thread]) -> None:
        """Start threads, each of which submits a job and waits for its end."""
        self._threads = [thread for thread in self._threads if thread.is_alive()] + list(threads)
        for thread in threads:
            thread.start()

    def cancel(self) -> None:
        """Cancel all that does not end now, in another thread."""
        self.is_cancelled = True
        if self._threads:
            threading.Thread(target=self._cancel, name="ronde-spark-cancel", daemon=True).start()

    def _cancel(self) -> None:
        """Interrupt until no thread waits: a job that is just being submitted does not notice."""
        ends_s = time.monotonic() + LONGEST_CANCEL_S
        pause_s = FIRST_PAUSE_S  # a job whose tasks have ended is about to end, too
        while time.monotonic() < ends_s:
            for thread in self._threads:
                thread.join(pause_s)
            if not any(thread.is_alive() for thread in self._threads) or not self._interrupt(self.name):
                return
            pause_s = PAUSE_S
