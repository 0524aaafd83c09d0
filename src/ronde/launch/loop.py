"""The launcher's event loop: waits for descriptors, which a turn serves in a fixed order, and for timers."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Loop", "Order"]


class Order(IntEnum):
    """The order in which a turn serves descriptors.

    The launcher learns of a signal to the whole job before the deaths that it causes, of a worker's output and uncaught
    exception before its death, and of deaths on this node before the news of other nodes.
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
    """Descriptors and timers, each with the function that serves it."""

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
        """Serve the descriptor whenever it is ready; stop if `wanted` is false."""
        if wanted and fd not in self._watched:
            self._watched[fd] = _Watch(order, fd, serve)
            self._selector.register(fd, events, self._watched[fd])
        elif not wanted:
            self.unwatch(fd)

    def unwatch(self, fd: int) -> None:
        """Stop serving the descriptor. Call this before you close it."""
        if fd in self._watched:
            self._selector.unregister(fd)
            del self._watched[fd]

    def set_timer(self, owner: object, at_ns: int | None, serve: Callable[[], None]) -> None:
        """Call `serve` once, at this time of the monotonic clock, instead of the owner's earlier time. None: never."""
        self._timers.pop(owner, None)
        if at_ns is not None:
            self._timers[owner] = at_ns, serve

    def turn(self) -> None:
        """Wait until a descriptor is ready or a timer rings, and serve all that are."""
        ready: list[_Watch] = [key.data for key, _ in self._selector.select(self._timeout_s())]
        for watch in sorted(ready, key=lambda each: each.order):
            if self._watched.get(watch.fd) is watch:  # else unwatched earlier in this turn
                watch.serve()
        now_ns = time.monotonic_ns()
        for owner, (at_ns, serve) in list(self._timers.items()):
            if at_ns <= now_ns and self._timers.get(owner) == (at_ns, serve):
                del self._timers[owner]
                serve()

    def close(self) -> None:
        """Close the selector; watched descriptors stay open."""
        self._selector.close()

    def _timeout_s(self) -> float | None:
        if not self._timers:
            return None
        first_ns = min(at_ns for at_ns, _ in self._timers.values())
        return max(0, first_ns - time.monotonic_ns()) / 1e9
