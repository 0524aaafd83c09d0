"""A model of the leaders of hosts (cpp/engine/leader.h), who agree along a tree what is ready everywhere."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.sim.common_order import require

from ronde.engine.merging import children_of, parent_of


@dataclass(frozen=True)
class Placement:
    """Which ranks are on which host, and how many hosts report to one. Hosts count by their lowest ranks."""

    host_of: list[int]
    arity: int
    ranks_of_host: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank, host in enumerate(self.host_of):
            if host == len(self.ranks_of_host):
                self.ranks_of_host.append([])
            self.ranks_of_host[host].append(rank)


def draw_placement(rng: random.Random, ranks: int) -> Placement:
    """Hosts with equally many ranks, next to each other or dealt out, or with as many as it happens."""
    per_host = min(ranks, rng.choice((1, 1, 1, 2, 2, 3, 8, ranks)))
    hosts = -(-ranks // per_host)
    how = rng.choice(("blocks", "dealt", "uneven"))
    if how == "blocks":
        drawn = [rank // per_host for rank in range(ranks)]
    elif how == "dealt":
        drawn = [rank % hosts for rank in range(ranks)]
    else:
        drawn = [rng.randrange(hosts) for _ in range(ranks)]
    numbers: dict[int, int] = {}
    host_of = [numbers.setdefault(host, len(numbers)) for host in drawn]
    return Placement(host_of, rng.choice((1, 1, 2, 2, 3, 8, 16) if ranks <= 64 else (8, 16, 100)))


@dataclass
class Note:
    """From a leader to its parent."""

    rounds: int  # that its log has
    ready: list[int] = field(default_factory=list)
    wanted: int = 0  # the number of the negotiation round that is needed


class Leader:
    """The leader of one host. Slots are ready when all ranks of the host, and all children, have said so."""

    def __init__(self, host: int, placement: Placement, rng: random.Random, capacity: int) -> None:
        hosts = len(placement.ranks_of_host)
        self.host = host
        self.parent = parent_of(host, placement.arity)
        self.children = children_of(host, hosts, placement.arity)
        self.arrived = 0  # entries of the common log that this host has
        self.arrives_up_to = 1 << 62  # less if the parent has died
        self.inbox: deque[tuple[int, Note]] = deque()
        self.wanted = 0  # negotiation rounds in all that somebody from here down has asked for
        self._rng = rng
        self._local_size = len(placement.ranks_of_host[host])
        self._bits = dict.fromkeys(range(capacity), 0)  # by slot: how many ranks have set theirs
        self._joined = 0  # ranks whose bits nobody waits for
        self._complete: dict[int, None] = {}  # slots for which all others have
        self._ready_under: dict[int, int] = {}  # by slot: how many children have reported it
        self._reported: set[int] = set()
        self._wanted_reported = 0
        self._rounds = 0
        self._through = self._local_size  # ranks that are through with the last negotiation round

    def set_bit(self, slot: int) -> None:
        self._bits[slot] += 1
        if self._bits[slot] + self._joined == self._local_size:
            self._complete[slot] = None

    def take_back_bit(self, slot: int) -> None:
        self._complete.pop(slot, None)
        self._bits[slot] -= 1

    def note_joined(self, has_joined: bool) -> None:
        self._joined += 1 if has_joined else -1
        here = self._local_size - self._joined
        self._complete = dict.fromkeys(slot for slot, bits in self._bits.items() if bits == here)

    def note_through(self, number: int) -> None:
        """A rank is through with that negotiation round. It does not know of rounds that others have begun since."""
        self._through += number == self._rounds

    def ready(self) -> list[int]:
        """What is ready from here down, and has not been reported."""
        if self._through < self._local_size:
            return []
        everywhere = len(self.children)
        return [
            slot
            for slot in self._complete
            if slot not in self._reported and self._ready_under.get(slot, 0) == everywhere
        ]

    def some_of(self, slots: Sequence[int]) -> list[int]:
        shuffled = self._rng.sample(slots, len(slots))
        return shuffled if self._rng.random() < 0.5 else shuffled[: self._rng.randint(1, len(slots))]

    def note_for_parent(self) -> Note | None:
        ready = self.ready()
        if self.wanted > max(self._wanted_reported, self._rounds) and not (
            ready and self._rng.random() < 0.5
        ):
            self._wanted_reported = self.wanted
            return Note(self._rounds, wanted=self.wanted)
        if ready:
            slots = self.some_of(ready)
            self._reported.update(slots)
            return Note(self._rounds, slots)
        return None

    def read_note(self) -> bool:
        if not self.inbox:
            return False
        child, note = self.inbox.popleft()
        require(note.rounds <= self._rounds, "host", child, "is ahead of its parent", self.host)
        self.wanted = max(self.wanted, note.wanted)
        if self.believes(note):
            for slot in note.ready:
                self._ready_under[slot] = self._ready_under.get(slot, 0) + 1
                counted = self._ready_under[slot]
                require(counted <= len(self.children), "slot", slot, "is reported twice to host", self.host)
        return True

    def believes(self, note: Note) -> bool:
        """What was ready before the last negotiation round may be something else now, and will be reported again."""
        return note.rounds == self._rounds

    def append(self, slots: list[int] | None) -> None:
        """The next entry of the log: these slots, or a negotiation round."""
        self.arrived += 1
        if slots is None:
            self._rounds += 1
            self._through = 0
            self._reported.clear()
            self._ready_under.clear()
            return
        for slot in slots:
            require(slot in self._complete, "slot", slot, "was not ready on host", self.host)
            self._bits[slot] = 0
            if self._joined < self._local_size:
                del self._complete[slot]
            self._reported.discard(slot)
            self._ready_under.pop(slot, None)
