"""Decides which lines a service logs about refused connections: one for each reason in ten seconds. Pure.

An unauthenticated peer chooses how often it connects and what it sends, and must not choose how much is logged. A line
has the reason, the number of connections and the address of the last one. The number of reasons is limited; further
ones count as one reason.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Refusals"]

INTERVAL_NS = 10 * 10**9
MOST_REASONS = 8
OTHER_REASONS = "other reasons"


@dataclass
class _Tally:
    logged_ns: int
    count: int = 0  # of connections that no line counts yet
    peer: str = ""


class Refusals:
    """The connections that one service has refused.

    `summary`: describes the last one, for errors about missing peers; empty if there was none.
    """

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self.summary = ""

    def note_refusal(self, reason: str, peer: str, now_ns: int) -> list[str]:
        """Count a connection from `peer`; return the lines to log now, about this and earlier ones."""
        self.summary = _line(reason, 1, peer)
        lines = self._take_lines(now_ns)
        tally = self._tallies.get(reason)
        if tally is None and len(self._tallies) >= MOST_REASONS:
            reason = OTHER_REASONS
            tally = self._tallies.get(reason)
        if tally is None:
            self._tallies[reason] = _Tally(now_ns)
            return [*lines, _line(reason, 1, peer)]
        tally.count += 1
        tally.peer = peer
        return lines

    def final_lines(self) -> list[str]:
        """Return the lines about connections that were counted and not logged."""
        return self._take_lines(None)

    def _take_lines(self, now_ns: int | None) -> list[str]:
        """Return the lines that are due, all if `now_ns` is None, and forget reasons without new connections."""
        lines = []
        for reason, tally in list(self._tallies.items()):
            if now_ns is not None and now_ns - tally.logged_ns < INTERVAL_NS:
                continue
            if tally.count:
                lines.append(_line(reason, tally.count, tally.peer))
                tally.count = 0
                tally.logged_ns = now_ns or tally.logged_ns
            else:
                del self._tallies[reason]
        return lines


def _line(reason: str, count: int, peer: str) -> str:
    if count == 1:
        return f"turned away a connection from {peer}: {reason}"
    return f"turned away {count:,} more connections, the last from {peer}: {reason}"
