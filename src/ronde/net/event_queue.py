"""A queue of events from other threads, with a descriptor that is readable while it is not empty."""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

__all__ = ["EventQueue"]

Event = TypeVar("Event")


class EventQueue(Generic[Event]):
    """A queue of events. Any thread may call `put`; one thread calls `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._list: list[Event] = []
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def put(self, event: Event) -> None:
        """Append an event; ignored after `close`."""
        with self._lock:
            if self._fd >= 0:
                self._list.append(event)
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[Event]:
        """Return all events since the last call."""
        with self._lock:
            if self._list:
                os.eventfd_read(self._fd)
            events, self._list = self._list, []
            return events

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self._list = []
