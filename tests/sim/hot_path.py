"""A model of the hot path (cpp/engine/cycle.h): bits, the log that all ranks read, and negotiation rounds.

The leaders of hosts decide along a tree what comes next (leaders.py). The log of every host is the beginning of one
common log. It allows more than the real one does: rank 0 may decide any part of what is ready, in any order, begin
negotiation rounds that nobody has asked for, and let both wait; so may every leader with what it reports. So what holds
here holds there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.sim.leaders import Leader, Placement

from ronde.engine.merging import (
    Batch,
    BatchReader,
    batch_of,
    batch_of_outboxes,
    encode_batch,
    merge_batches,
    parent_of,
    ranks_under,
)
from ronde.engine.messages import Message, Run, StreamItem, encode_requests
from ronde.engine.negotiation import Coordinator
from ronde.rank_set import RankSet

MOST_NEEDLESS_ROUNDS = 3


@dataclass
class NegotiationRound:
    """An entry of the log. It has a stream once all ranks have come to it and handed over what they have to say."""

    number: int
    outboxes: list[Sequence[Message]]
    missing: int
    stream: Sequence[StreamItem] | None = None
    cache: dict[int, str] = field(default_factory=dict)  # what the coordinator holds after it
    first_replica: dict[int, Run] | None = None  # what the first rank holds that is through with it


class HotPath:
    """`wake_leader` and `wake_ranks`: called with the host for which there may be something to do."""

    def __init__(
        self,
        placement: Placement,
        rng: random.Random,
        capacity: int,
        wake_leader: Callable[[int], None],
        wake_ranks: Callable[[int], None],
    ) -> None:
        self._placement = placement
        self._rng = rng
        self._wake_leader, self._wake_ranks = wake_leader, wake_ranks
        self._ranks = len(placement.host_of)
        self._rounds = 0
        self._needless = 0
        self.log: list[list[int] | NegotiationRound] = []
        self.leaders = [
            Leader(host, placement, rng, capacity) for host in range(len(placement.ranks_of_host))
        ]

    def leader_of(self, rank: int) -> Leader:
        return self.leaders[self._placement.host_of[rank]]

    def set_bit(self, rank: int, slot: int) -> None:
        leader = self.leader_of(rank)
        leader.set_bit(slot)
        self._wake_leader(leader.host)

    def take_back_bit(self, rank: int, slot: int) -> None:
        self.leader_of(rank).take_back_bit(slot)

    def note_joined(self, rank: int, has_joined: bool) -> None:
        """From here on nobody waits for the rank's bits, or again."""
        self.leader_of(rank).note_joined(has_joined)

    def want_round(self, rank: int, number: int) -> None:
        leader = self.leader_of(rank)
        leader.wanted = max(leader.wanted, number)
        self._wake_leader(leader.host)

    def is_through(self, rank: int, round_: NegotiationRound) -> None:
        leader = self.leader_of(rank)
        leader.note_through(round_.number)
        self._wake_leader(leader.host)

    def step(self, host: int) -> bool:
        """What a leader does when it looks: one thing. False if there is nothing to do."""
        leader = self.leaders[host]
        above = self.leaders[leader.parent] if host > 0 else None
        if above and min(above.arrived, leader.arrives_up_to) > leader.arrived and self._rng.random() < 0.5:
            self._arrive(leader)
            return True
        if leader.read_note():
            return True
        if above is None:
            return self._decide(leader)
        note = leader.note_for_parent()
        if note:
            above.inbox.append((host, note))
            self._wake_leader(above.host)
            return True
        if min(above.arrived, leader.arrives_up_to) > leader.arrived:
            self._arrive(leader)
            return True
        return False

    def _arrive(self, leader: Leader) -> None:
        """The next entry of the log comes from the parent, and can be passed on."""
        entry = self.log[leader.arrived]
        leader.append(entry if isinstance(entry, list) else None)
        for child in leader.children:
            self._wake_leader(child)
        self._wake_ranks(leader.host)

    def _decide(self, leader: Leader) -> bool:
        ready = leader.ready()
        wants_round = leader.wanted > self._rounds
        if not wants_round and self._needless < MOST_NEEDLESS_ROUNDS and self._rng.random() < 0.01:
            self._needless += 1
            wants_round = True
        if ready and not (wants_round and self._rng.random() < 0.5):
            self.log.append(leader.some_of(ready))
        elif wants_round:
            self._rounds += 1
            self.log.append(NegotiationRound(self._rounds, [()] * self._ranks, self._ranks))
        else:
            return False
        self._arrive(leader)
        return True

    def hand_over(self, round_: NegotiationRound, rank: int, outbox: Sequence[Message]) -> bool:
        """True if all outboxes are there, so that the coordinator can do its step."""
        round_.outboxes[rank] = outbox
        round_.missing -= 1
        return round_.missing == 0

    def coordinate(
        self, round_: NegotiationRound, coordinator: Coordinator, used: Sequence[int], through_the_codec: bool
    ) -> None:
        round_.stream = coordinator.step_merged(self._merged(round_.outboxes, through_the_codec), used)
        round_.cache = coordinator.cache.names()

    def _merged(self, outboxes: Sequence[Sequence[Message]], through_the_codec: bool) -> list[Batch]:
        """What arrives at rank 0: every leader merges what its ranks and its children say."""
        ranks_of_host, arity = self._placement.ranks_of_host, self._placement.arity
        arrived: list[list[Batch]] = [[] for _ in ranks_of_host]
        for host in reversed(range(len(ranks_of_host))):
            if through_the_codec:
                texts = {rank: encode_requests(outboxes[rank]) for rank in ranks_of_host[host]}
                arrived[host].append(batch_of_outboxes(texts))
            else:
                arrived[host] += [
                    batch_of(RankSet.of([rank]), outboxes[rank]) for rank in ranks_of_host[host]
                ]
            if host > 0:
                batch = merge_batches(arrived[host])
                if through_the_codec:
                    ranks = ranks_under(host, ranks_of_host, arity)
                    batch = BatchReader().read(encode_batch(batch), ranks)
                arrived[parent_of(host, arity)].append(batch)
        return arrived[0]
