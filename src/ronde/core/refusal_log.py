"""Decides what is logged about connections that were turned away: for each reason one line within ten seconds.

Peers that have proved nothing choose how often they connect and what they send, so they must not choose how much is
logged. A line has the reason, how many connections it is about, and the address of the last one. The number of reasons
is limited too; beyond it they count as one.
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
    count: int = 0  # of connections that no line has mentioned yet
    peer: str = ""


class Refusals:
    """The connections that one service has turned away.

    `summary` describes the last one, for an error that has to say why somebody did not come; it is empty if there was
    none.
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
        """Return the lines about what has been counted and not logged."""
        return self._take_lines(None)

    def _take_lines(self, now_ns: int | None) -> list[str]:
        """Return the lines that are due, and forget the reasons of which there was nothing new."""
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
