"""Jobs or queries of Spark that are cancelled together. Each keeps a thread waiting until it ends."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence

__all__ = ["Submissions"]

OWN_END_S = 1.0  # for jobs to end of their own accord, because their tasks do, before they are interrupted
AGAIN_S = 0.5  # between interruptions
LONGEST_WAIT_S = 5.0  # of `cancel`; what takes longer ends while the caller goes on
LONGEST_CANCEL_S = 60.0


class Submissions:
    """What a cluster has submitted since it was made, or since it was last cancelled.

    `tag`: what Spark calls them together. `interrupt`: has Spark cancel all that runs with this tag; returns whether
    the session still lives.
    """

    def __init__(self, interrupt: Callable[[str], bool]) -> None:
        self.tag = f"ronde-{uuid.uuid4().hex}"
        self.is_cancelled = False
        self._interrupt = interrupt
        self._threads: list[threading.Thread] = []

    def start(self, threads: Sequence[threading.Thread]) -> None:
        """Start threads, each of which submits a job and waits for its end."""
        self._threads = [thread for thread in self._threads if thread.is_alive()] + list(threads)
        for thread in threads:
            thread.start()

    def cancel(self) -> None:
        """Return when all has ended, what does not end soon by an interruption, or after `LONGEST_WAIT_S`.

        A program that ended before its tasks would leave an error of the JVM on the screen, which then cannot report
        the tasks' accumulators.
        """
        self.is_cancelled = True
        if self._threads:
            thread = threading.Thread(target=self._cancel, name="ronde-spark-cancel", daemon=True)
            thread.start()
            thread.join(LONGEST_WAIT_S)

    def _cancel(self) -> None:
        """Interrupt until no thread waits: a job that is just being submitted does not notice."""
        ends_s = time.monotonic() + LONGEST_CANCEL_S
        has_ended = self._wait(OWN_END_S)
        while not has_ended and time.monotonic() < ends_s and self._interrupt(self.tag):
            has_ended = self._wait(AGAIN_S)

    def _wait(self, within_s: float) -> bool:
        """Return whether all threads have ended within the time."""
        ends_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
