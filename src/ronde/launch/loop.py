"""Where the launcher's one thread waits: for descriptors, in a fixed order within a turn, and for times."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from enum import IntEnum

from ronde.light_dataclasses import dataclass

__all__ = ["Loop", "Order"]


class Order(IntEnum):
    """Who is served first within a turn.

    A signal sent to the whole job is known before the deaths that it causes; what a worker said, and that it has raised
    an exception, before its death; and the deaths of our own workers before what other nodes tell.
    """

    SIGNALS = 0
    OUTPUT = 1
    SINKS = 2
    RAISED = 3
    EXITS = 4
    NODES = 5


@dataclass(frozen=True, eq=False)
class _Watch:
    order: Order
    fd: int
    serve: Callable[[], None]


class Loop:
    """Descriptors and timers, each with whoever serves it. Nothing is polled."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._watched: dict[int, _Watch] = {}
        self._timers: dict[object, tuple[int, Callable[[], None]]] = {}

    def watch(
        self,
        fd: int,
        order: Order,
        serve: Callable[[], None],
        *,
        wanted: bool = True,
        events: int = selectors.EVENT_READ,
    ) -> None:
        """Serve the descriptor whenever it is ready, or not any more if that is not `wanted`."""
        if wanted and fd not in self._watched:
            self._watched[fd] = _Watch(order, fd, serve)
            self._selector.register(fd, events, self._watched[fd])
        elif not wanted:
            self.unwatch(fd)

    def unwatch(self, fd: int) -> None:
        """Let go of the descriptor, before it is closed."""
        if fd in self._watched:
            self._selector.unregister(fd)
            del self._watched[fd]

    def set_timer(self, owner: object, at_ns: int | None, ring: Callable[[], None]) -> None:
        """Call `ring` at this time of the monotonic clock, once; it replaces the owner's earlier time. None: never."""
        self._timers.pop(owner, None)
        if at_ns is not None:
            self._timers[owner] = at_ns, ring

    def turn(self) -> None:
        """Wait until somebody is to be served, and serve all who are."""
        ready: list[_Watch] = [key.data for key, _ in self._selector.select(self._timeout_s())]
        for watch in sorted(ready, key=lambda each: each.order):
            if self._watched.get(watch.fd) is watch:  # else let go of earlier in this turn
                watch.serve()
        now_ns = time.monotonic_ns()
        for owner, (at_ns, ring) in list(self._timers.items()):
            if at_ns <= now_ns and self._timers.get(owner) == (at_ns, ring):
                del self._timers[owner]
                ring()

    def close(self) -> None:
        """Let go of everything."""
        self._selector.close()

    def _timeout_s(self) -> float | None:
        if not self._timers:
            return None
        first_ns = min(at_ns for at_ns, _ in self._timers.values())
        return max(0, first_ns - time.monotonic_ns()) / 1e9
