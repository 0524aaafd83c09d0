"""Decides which strangers a listener accepts, and which of them it closes when others wait in its queue. Pure.

A *stranger* is a connection whose other end has not yet proved that it knows the job key. The rules:
  1. A listener has at most `capacity` strangers. Others wait in the kernel's queue, which keeps what they send.
  2. A stranger must leave early only while others wait. It is one of the source (network address) with the most
     strangers, so that a crowd from one address costs other addresses nothing. The oldest silent one leaves after
     SILENT_NS, because an honest peer sends its hello at once; else the oldest of all after TALKING_NS.
  3. An honest peer that had to leave connects again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["SILENT_NS", "TALKING_NS", "Room", "Strangers"]

SILENT_NS = 50 * 10**6
TALKING_NS = 500 * 10**6

Stranger = TypeVar("Stranger", bound=Hashable)


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
