"""Ends a process whose step takes too long, with its stacks, so that the launcher replaces it.

A thread watches the time since the last step (`step_times` says how long one may take). If one rank is stuck, all ranks
are late. The stuck one is the rank that waits for no other: it has no call and no tensor under way. The others stay,
and get a PeerLostError as after any other loss.

The thread needs the interpreter. It does not see a process that is stopped, or whose native code keeps the
interpreter's lock; the report of the waiting ranks names it (docs/stalls.md).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ronde.elastic.step_times import StepRule, StepTimes
from ronde.errors import TimeoutError
from ronde.process.uncaught import announce_exception
from ronde.stall.stacks import format_stacks
from ronde.stall.watch import is_waiting

__all__ = ["StepWatch"]

# A rank that has just been released is between two calls for a moment; `is_waiting` knows some calls after a second.
_LOOK_AGAIN_S, _NUM_LOOKS = 0.1, 12
_EXIT_CODE = 1


def end_process(text: str) -> None:
    """Print a text, tell the launcher, and end this process at once: its main thread does not answer."""
    sys.stderr.write(f"ronde: {text}\n")
    sys.stderr.flush()
    announce_exception(TimeoutError(text.partition("\n")[0], "step"))
    os._exit(_EXIT_CODE)


class StepWatch:
    """The thread that watches the steps of this process.

    Args:
        rule: how long a step may take.
        describe: returns how messages call this process, such as "rank 2 (pid 4711)".
        end: what happens to a process that is stuck; it gets the text of the message (default: print it and exit).
    """

    def __init__(
        self, rule: StepRule, describe: Callable[[], str], end: Callable[[str], None] = end_process
    ) -> None:
        self._times = StepTimes(rule)
        self._describe, self._end = describe, end
        self._changed = threading.Condition()
        self._began_ns: int | None = None  # None: outside of the training
        self._waits_for_limit = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Watch the steps of the block, which is entered again after each change of the members of the job."""
        self._set_began(time.monotonic_ns())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ronde-steps", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._set_began(None)
            self._times.interrupt()

    def note_step(self) -> None:
        """Note that a step has ended: `State.commit` calls it."""
        now_ns = time.monotonic_ns()
        with self._changed:
            if self._began_ns is not None:
                self._times.add(now_ns - self._began_ns)
                self._began_ns = now_ns
                if (
                    self._waits_for_limit
                ):  # else the thread wakes at the limit, and sees that a step has ended
                    self._changed.notify()

    def _set_began(self, began_ns: int | None) -> None:
        with self._changed:
            self._began_ns = began_ns
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                began_ns = self._began_ns
                limit_ns = self._times.limit_ns
                self._waits_for_limit = began_ns is None or limit_ns is None
                if began_ns is None or limit_ns is None:
                    self._changed.wait()
                    continue
                left_ns = began_ns + limit_ns - time.monotonic_ns()
                if left_ns > 0:
                    self._changed.wait(left_ns / 1e9)
                    continue
            if self._is_stuck(began_ns):
                self._end(self._text(began_ns, limit_ns))
                return

    def _is_stuck(self, began_ns: int) -> bool:
        """Return whether the step goes on, and waits for no other rank in any of several looks."""
        for _ in range(_NUM_LOOKS):
            with self._changed:
                self._changed.wait(_LOOK_AGAIN_S)
                if self._began_ns != began_ns:
                    return False
            if is_waiting():
                return False
        return True

    def _text(self, began_ns: int, limit_ns: int) -> str:
        spent_s = (time.monotonic_ns() - began_ns) / 1e9
        return (
            f"{self._describe()} is stuck: its step takes {spent_s:.1f} s so far, and waits for no other rank; the "
            f"longest one before took {self._times.longest_ns / 1e9:.3f} s, and the limit is {limit_ns / 1e9:.1f} s. "
            f"The process ends, so that the launcher can replace it.\n{format_stacks()}"
        )
