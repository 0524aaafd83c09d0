"""What is counted of a call, for which jobs, and what a cache line counts. Pure.

Memory counts whole cache lines that move, as if each rank had a core with an endless cache. A line of an array counts
one when it is read and one when it returns to memory after the call, so a copy counts three bytes for each byte. Shared
memory stays in caches: a line of it counts one when it moves to another core, and one when a core invalidates the
copies of other cores.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "COPY",
    "FILL",
    "LINE_BYTES",
    "READ",
    "REWRITE",
    "TAKE",
    "TAKE_OVER",
    "WRITE",
    "JobShape",
    "Traffic",
    "whole_lines",
]

LINE_BYTES = 64
READ, WRITE, REWRITE = 1, 2, 1  # of a line of an array; a rewrite follows its read
COPY = READ + WRITE
# Of a line of shared memory, for its writer, for a reader, and for a reader that then writes to it.
FILL, TAKE, TAKE_OVER = 1, 1, 1


@dataclass(frozen=True)
class JobShape:
    """Hosts with equally many ranks, numbered host by host."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Traffic:
    """What one call of an algorithm costs, in counts.

    Attributes:
        sent_bytes: What all hosts together send to other hosts.
        busiest_bytes: What the busiest host sends or receives, whichever is more.
        lead_bytes: What a link carries before the last host begins to receive, where hosts pass data on.
        steps: How many messages between hosts follow one another.
        frames: How many messages, or segments of one, the busiest rank sends to and receives from other hosts.
        memory_bytes: What the processors of the busiest host move to and from memory, in whole lines.
        exchanges: How often all ranks of a host wait for one another.
        pieces: The number of pieces in which data cross between hosts while others move through memory (1: no overlap).
    """

    sent_bytes: int = 0
    busiest_bytes: int = 0
    lead_bytes: int = 0
    steps: int = 0
    frames: int = 0
    memory_bytes: int = 0
    exchanges: int = 0
    pieces: int = 1

    def then(self, later: Traffic) -> Traffic:
        """Return the traffic of two phases, one after the other."""
        return Traffic(
            self.sent_bytes + later.sent_bytes,
            self.busiest_bytes + later.busiest_bytes,
            self.lead_bytes + later.lead_bytes,
            self.steps + later.steps,
            self.frames + later.frames,
            self.memory_bytes + later.memory_bytes,
            self.exchanges + later.exchanges,
        )


def whole_lines(nbytes: int) -> int:
    """Return the bytes of the lines in which so many bytes lie."""
    return -(-nbytes // LINE_BYTES) * LINE_BYTES
