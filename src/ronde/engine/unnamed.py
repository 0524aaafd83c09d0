"""Generates names for operations without one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from ronde._native import Handle

__all__ = ["Unnamed"]

_IN_FLIGHT = 64  # so many without a name may be in flight, of each sort


class Unnamed:
    """Names for one sort of operation: numbered in the order of submission, again and again."""

    def __init__(self, sort: str) -> None:
        self.lock = threading.RLock()
        self._sort = sort
        self._count = 0
        # What is in flight is kept alive elsewhere; what nobody wants any more is not kept by its name.
        self._handles: list[Callable[[], Handle | None]] = [lambda: None] * _IN_FLIGHT

    def next_name(self) -> str:
        """Return the next name, once it is free again."""
        earlier = self._handles[self._count % _IN_FLIGHT]()
        if earlier is not None and not earlier.done():
            earlier.wait()
        return f"{self._sort}.noname.{self._count % _IN_FLIGHT}"

    def remember(self, handle: Handle) -> Handle:
        """The tensor with the latest name has been submitted."""
        self._handles[self._count % _IN_FLIGHT] = weakref.ref(handle)
        self._count += 1
        return handle
