"""The launcher's stdout and stderr, which take lines of the workers and of the launcher without blocking."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import TextIO

from ronde.launch.loop import Loop, Order
from ronde.process.output import Piece, Sink, Source, open_sinks

__all__ = ["Screen", "Streams"]

Streams = tuple[TextIO | None, TextIO | None]

_OURSELVES = Source(-1, "ronde", b"")


class Screen:
    """Standard output and standard error; `broken` is called once for each that becomes unwritable.

    `streams`: objects with a method `write` in their places; None: the process's own.
    """

    def __init__(self, loop: Loop, broken: Callable[[], None], streams: Streams = (None, None)) -> None:
        self._loop = loop
        self._broken = broken
        self.out, self.err = open_sinks(*streams)
        self._sinks = {self.out, self.err}
        self._gone: set[Sink] = set()

    def say(self, line: bytes) -> None:
        """Show a line of the launcher."""
        self.err.show(_OURSELVES, [Piece(line, b"\n")])

    def balance(self) -> None:
        """Watch the streams that have unwritten lines, and report the broken ones. Call this before each turn."""
        for sink in self._sinks:
            self._loop.watch(
                sink.fileno(), Order.SINKS, sink.flush, wanted=sink.waiting, events=selectors.EVENT_WRITE
            )
        for sink in {sink for sink in self._sinks if sink.problem} - self._gone:
            self._gone.add(sink)
            self._broken()

    @property
    def waiting(self) -> bool:
        """Whether lines are still unwritten."""
        return any(sink.waiting for sink in self._sinks)

    def close(self) -> None:
        """Stop writing to the streams, which stay open."""
        for sink in self._sinks:
            self._loop.unwatch(sink.fileno())
            sink.close()
