"""A model of the hot path (cpp/engine/cycle.h): bits, the log that all ranks read, and rank 0, which writes it.

It allows more than the real one does: rank 0 may decide any part of what is ready, in any order, begin cold rounds that
nobody has asked for, and let both wait. So what holds here holds there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ronde.core.messages import AllJoined, Joined, Message, Run, StreamItem
from ronde.core.negotiation import Coordinator

MOST_NEEDLESS_ROUNDS = 3


@dataclass
class ColdRound:
    """An entry of the log. It has a stream once all ranks have come to it and handed over what they have to say."""

    outboxes: list[Sequence[Message]]
    missing: int
    stream: Sequence[StreamItem] | None = None
    cache: dict[int, str] = field(default_factory=dict)  # what the coordinator holds after it
    first_replica: dict[int, Run] | None = None  # what the first rank holds that is through with it
    through: int = 0  # ranks that have applied all of it


class HotPath:
    def __init__(self, ranks: int, rng: random.Random) -> None:
        self._ranks = ranks
        self._rng = rng
        self._bits: dict[int, int] = {}  # by slot: how many ranks have set theirs
        self._joined = 0  # ranks whose bits nobody waits for
        self._ready: list[int] = []
        self._last_round: ColdRound | None = None
        self._wanted = 0  # cold rounds in all that somebody has asked for
        self._rounds = 0
        self._needless = 0
        self.log: list[list[int] | ColdRound] = []

    def set_bit(self, slot: int) -> None:
        self._bits[slot] = self._bits.get(slot, 0) + 1
        if self._is_ready(slot):
            self._ready.append(slot)

    def take_back_bit(self, slot: int) -> None:
        if self._is_ready(slot):
            self._ready.remove(slot)
        self._bits[slot] -= 1

    def _is_ready(self, slot: int) -> bool:
        return self._bits[slot] > 0 and self._bits[slot] + self._joined == self._ranks

    def want_round(self, number: int) -> None:
        self._wanted = max(self._wanted, number)

    def step(self) -> bool:
        """What rank 0 does when it looks: at most one more entry of the log. False if there is nothing to do."""
        may_decide = self._ready and (self._last_round is None or self._last_round.through == self._ranks)
        wants_round = self._wanted > self._rounds
        if not wants_round and self._needless < MOST_NEEDLESS_ROUNDS and self._rng.random() < 0.01:
            self._needless += 1
            wants_round = True
        if may_decide and not (wants_round and self._rng.random() < 0.5):
            self._decide()
        elif wants_round:
            self._rounds += 1
            self._last_round = ColdRound([()] * self._ranks, self._ranks)
            self.log.append(self._last_round)
        else:
            return False
        return True

    def _decide(self) -> None:
        self._rng.shuffle(self._ready)
        count = len(self._ready) if self._rng.random() < 0.5 else self._rng.randint(1, len(self._ready))
        slots, self._ready = self._ready[:count], self._ready[count:]
        for slot in slots:
            self._bits[slot] = 0
        self.log.append(slots)

    def hand_over(self, round_: ColdRound, rank: int, outbox: Sequence[Message]) -> bool:
        """True if all outboxes are there, so that the coordinator can do its step."""
        round_.outboxes[rank] = outbox
        round_.missing -= 1
        return round_.missing == 0

    def coordinate(self, round_: ColdRound, coordinator: Coordinator, used: Sequence[int]) -> None:
        round_.stream = coordinator.step(round_.outboxes, used)
        round_.cache = coordinator.cache.names()
        for item in round_.stream:
            if isinstance(item, Joined):
                self._joined += 1
            elif isinstance(item, AllJoined):
                self._joined = 0
        self._ready = [slot for slot in sorted(self._bits) if self._is_ready(slot)]
