"""The coordinator's view of the response cache: assigns slots to names, and evicts names that are out of use. Pure.

If a step uses a few more names than there are slots, each name is the least recently used one when its turn comes: to
evict that would leave no name in the cache that the step uses again. So a name stays until it has not been used for
`KEPT_USES` uses of others for each slot, and the names in excess are negotiated each time.

Only the coordinator decides that. The caches of the ranks are replicas that follow its stream, so every removal here
must become an item there.
"""

from __future__ import annotations

__all__ = ["ResponseCache"]


KEPT_USES = 4  # per slot: how many other uses a name outlives


class ResponseCache:
    """At most `capacity` names, each with a different slot from 0 to `capacity` - 1. With 0 nothing is cached."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity} is invalid: expected 0 or more slots")
        self._capacity = capacity
        self._slot_by_name: dict[str, int] = {}  # the least recently used first
        self._name_by_slot: dict[int, str] = {}
        self._uses = 0  # of all names, cached or not
        self._last_use: dict[str, int] = {}  # of cached names
        self._free = list(range(capacity - 1, -1, -1))  # the next one last

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self._capacity

    def names(self) -> dict[int, str]:
        """Return the name that each used slot holds, the least recently used one first."""
        return {slot: name for name, slot in self._slot_by_name.items()}

    def use(self, slot: int) -> None:
        """Make the slot the most recently used one. Raises ValueError if it holds nothing."""
        name = self._name_by_slot.get(slot)
        if name is None:
            raise ValueError(f"slot {slot} of the response cache cannot be used: it holds nothing")
        self._slot_by_name[name] = self._slot_by_name.pop(name)
        self._count_use(name)

    def remove(self, name: str) -> int | None:
        """Remove the name and return its slot, which is now free; None if it had none."""
        slot = self._slot_by_name.pop(name, None)
        if slot is not None:
            del self._name_by_slot[slot], self._last_use[name]
            self._free.append(slot)
        return slot

    def make_room(self) -> int | None:
        """If no slot is free and the least recently used name is out of use, remove it and return its slot."""
        if self._free or not self._capacity:
            return None
        oldest = next(iter(self._slot_by_name))
        if self._uses - self._last_use[oldest] < KEPT_USES * self._capacity:
            return None
        return self.remove(oldest)

    def add(self, name: str) -> int:
        """Return the slot of a new name; -1 if none is free. Raises ValueError if the name is cached."""
        if name in self._slot_by_name:
            raise ValueError(f"'{name}' is cached already")
        if not self._free:
            self._uses += 1
            return -1
        slot = self._free.pop()
        self._slot_by_name[name] = slot
        self._name_by_slot[slot] = name
        self._count_use(name)
        return slot

    def _count_use(self, name: str) -> None:
        self._uses += 1
        self._last_use[name] = self._uses
