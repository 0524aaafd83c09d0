"""Decides when to start workers without a place: spares, and replacements of workers that were lost. Pure.

The workers of a job that continue (`process/membership_channel`) need not wait for the start of a new one: it starts
and imports without a rank, waits for a place, and gets one in the round that follows. The shell starts, watches and
ends these processes, and knows which of them are ready.

Rules

1. There are as many processes in the reserve as the agent wants: its spares, and one for each worker that the present
   round lacks.
2. A worker that ends in the reserve, or within `SOON_NS` after it got its place without having taken part in a round,
   makes the next start wait: 1 s, then twice as long each time, up to 60 s. The end of another worker ends that: one
   that was killed at its work is replaced at once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SOON_NS", "Reserve", "ReserveEffect", "SetReserveTimer", "StartReserve"]

SOON_NS = 10 * 10**9
FIRST_WAIT_NS, LONGEST_WAIT_NS = 10**9, 60 * 10**9


@dataclass(frozen=True)
class StartReserve:
    """Start a worker without a place, and add its key by `note_started`."""


@dataclass(frozen=True)
class SetReserveTimer:
    """Call `wake_up` at this time."""

    at_ns: int


ReserveEffect = StartReserve | SetReserveTimer


class Reserve:
    """The machine. `wanted`: how many processes it should have; `ready`: the keys of those that wait for a place."""

    def __init__(self) -> None:
        self.wanted = 0
        self.ready: list[int] = []
        self._starting: set[int] = set()
        self._not_before_ns = 0
        self._wait_ns = 0  # before the next start, after workers that ended soon

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.ready) + len(self._starting)

    def want(self, now_ns: int, count: int) -> list[ReserveEffect]:
        """Want this many processes. Those that are there stay."""
        self.wanted = count
        return self.wake_up(now_ns)

    def wake_up(self, now_ns: int) -> list[ReserveEffect]:
        """Return the starts that are due."""
        lacking = self.wanted - self.size
        if lacking <= 0:
            return []
        if now_ns < self._not_before_ns:
            return [SetReserveTimer(self._not_before_ns)]
        return [StartReserve()] * lacking

    def note_started(self, key: int) -> None:
        """Note a process that has started."""
        self._starting.add(key)

    def note_ready(self, key: int) -> None:
        """Note that this process waits for a place."""
        if key in self._starting:
            self._starting.remove(key)
            self.ready.append(key)

    def take_ready(self) -> int | None:
        """Return the key of the process that has been ready for longest, which leaves the reserve; None without one."""
        return self.ready.pop(0) if self.ready else None

    def note_ended(self, now_ns: int, key: int) -> int:
        """Note that a process of the reserve has ended, or could not start. Return how long the next start waits."""
        self._starting.discard(key)
        if key in self.ready:
            self.ready.remove(key)
        return self._wait_longer(now_ns)

    def note_lost(self, now_ns: int, lived_ns: int, took_part: bool) -> int:
        """Note that a worker with a place has ended. Return how long the next start waits.

        `lived_ns`: how long it had the place. `took_part`: in the world of a round, as a worker that continues.
        """
        if took_part or lived_ns >= SOON_NS:
            self._wait_ns = 0
            return 0
        return self._wait_longer(now_ns)

    def _wait_longer(self, now_ns: int) -> int:
        self._wait_ns = min(2 * self._wait_ns, LONGEST_WAIT_NS) or FIRST_WAIT_NS
        self._not_before_ns = now_ns + self._wait_ns
        return self._wait_ns
