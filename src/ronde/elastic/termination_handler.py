"""Handles SIGTERM in a training: the process writes its last commit to disk, then ends by the signal.

A launcher ends all workers of a job when too few are left, and when its host is withdrawn. The default action of the
signal ends a process at once. Here a handler acts between two instructions of the main thread, and not while the state
is being copied or exchanged (`deferring`). The process then ends by the signal, as without the handler.

The program's own handler stays, if it has one. A forked child, such as the worker of a DataLoader, ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["TerminationHandler"]


class TerminationHandler:
    """The handler of SIGTERM. `act`: called in the main thread before the process ends; raises no error."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._depth = 0
        self._pid = os.getpid()
        self._is_due = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Act on the signal during the block, unless the program does, or this is not the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Act after the block, at the earliest: it changes the state or its copies."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._is_due and not self._depth:
                self._end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_due = True
        if not self._depth or self._pid != os.getpid():
            self._end()

    def _end(self) -> None:
        if self._pid == os.getpid():
            self._act()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
