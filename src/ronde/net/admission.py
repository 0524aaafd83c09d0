"""Decides about strangers at a listener: which to accept and to close, what to log, when to try again. Pure.

A *stranger* is a connection whose other end has not yet proved that it knows the job key. The rules:

  1. A listener has at most `capacity` strangers. Others wait in the kernel's queue, which keeps what they send.
  2. A stranger must leave early only while others wait. It is one of the source (network address) with the most
     strangers, so that a crowd from one address costs other addresses nothing. The oldest silent one leaves after
     SILENT_NS, because an honest peer sends its hello at once; else the oldest of all after TALKING_NS.
  3. An honest peer that had to leave connects again.
  4. A stranger chooses how often it connects and what it sends, and must not choose how much is logged (`Refusals`).
     There is one line for each reason in ten seconds, with the number of connections and the address of the last one.
     The number of reasons is limited; further ones count as one reason.
  5. While `accept` fails, there are growing pauses and one report (`AcceptFailures`). A shortage (descriptors, memory)
     may pass, so the listener never gives up for that. Any other failure that lasts for GIVE_UP_NS is final, such as a
     system call that a sandbox forbids: peers should be refused at once rather than wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["SILENT_NS", "TALKING_NS", "AcceptFailures", "Refusals", "Room", "Strangers", "Verdict"]

# How long a stranger may stay while others wait: without a hello, and after it.
SILENT_NS, TALKING_NS = 50 * 10**6, 500 * 10**6
# Between two log lines with the same reason, and how many reasons are counted apart.
INTERVAL_NS = 10 * 10**9
MOST_REASONS = 8
OTHER_REASONS = "other reasons"
# Before a failing `accept` is tried again, and after which time it is final.
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 10 * 10**6, 10**9
GIVE_UP_NS = 10 * 10**9

Stranger = TypeVar("Stranger", bound=Hashable)


# Strangers


class Room(NamedTuple, Generic[Stranger]):
    """Whether the listener may accept one more: not before `wait_until_ns` (0: now), after it has closed `leaver`."""

    leaver: Stranger | None = None
    wait_until_ns: int = 0


class _Source(Generic[Stranger]):
    """The strangers from one address, the oldest first, with the time of their arrival or of their hello."""

    def __init__(self) -> None:
        self.silent: dict[Stranger, int] = {}
        self.talking: dict[Stranger, int] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.talking)


class Strangers(Generic[Stranger]):
    """The strangers of one listener."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sources: dict[str, _Source[Stranger]] = {}
        self._source_of: dict[Stranger, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def add_stranger(self, stranger: Stranger, source: str, now_ns: int) -> None:
        """Add a stranger that the listener has accepted from this address."""
        self._source_of[stranger] = source
        self._sources.setdefault(source, _Source()).silent[stranger] = now_ns

    def note_hello(self, stranger: Stranger, now_ns: int) -> None:
        """Note that a stranger has sent a whole hello."""
        source = self._sources[self._source_of[stranger]]
        source.silent.pop(stranger, None)
        source.talking[stranger] = now_ns

    def remove_stranger(self, stranger: Stranger) -> None:
        """Remove a stranger that was closed or has proved the key."""
        name = self._source_of.pop(stranger)
        source = self._sources[name]
        source.silent.pop(stranger, None)
        source.talking.pop(stranger, None)
        if not source:
            del self._sources[name]

    def find_room(self, now_ns: int, is_short: bool = False) -> Room[Stranger]:
        """Return whether the listener may accept one more; if `is_short`, only in place of another stranger."""
        if len(self._source_of) < self._capacity and not is_short:
            return Room()
        source = max(self._sources.values(), key=len)
        wait_until_ns = []
        for group, patience_ns in ((source.silent, SILENT_NS), (source.talking, TALKING_NS)):
            for stranger, since_ns in group.items():
                if now_ns >= since_ns + patience_ns:
                    return Room(leaver=stranger)
                wait_until_ns.append(since_ns + patience_ns)
                break
        return Room(wait_until_ns=min(wait_until_ns))


# What is logged


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


# Failures of `accept`


class Verdict(NamedTuple):
    """What to do now: report the failure if `is_new`, stop listening if `is_final`, else retry after `pause_ns`."""

    pause_ns: int
    is_new: bool
    is_final: bool


class AcceptFailures:
    """The failures of one listener since its last success."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._pause_ns = FIRST_PAUSE_NS

    def note_failure(self, is_shortage: bool, now_ns: int) -> Verdict:
        """Note a failure of `accept` that concerns the listener, and return what to do."""
        is_new = self._since_ns is None
        if self._since_ns is None:
            self._since_ns = now_ns
        is_final = not is_shortage and now_ns - self._since_ns >= GIVE_UP_NS
        verdict = Verdict(self._pause_ns, is_new, is_final)
        self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
        return verdict

    def note_success(self) -> None:
        """Note that `accept` has worked."""
        self._since_ns = None
        self._pause_ns = FIRST_PAUSE_NS
