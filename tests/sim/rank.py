"""A simulated rank: the shell around a Member, as ronde.engine is one, with a training thread that submits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.common_order import Outcome, require
from tests.sim.hot_path import ColdRound

from ronde.core.messages import (
    Message,
    Request,
    Run,
    StreamItem,
    decode_requests,
    decode_stream,
    encode_requests,
    encode_stream,
)
from ronde.core.negotiation import Closed, Effect, Evicted, Execute, Failed, Insert, Member

if TYPE_CHECKING:
    from tests.sim.negotiation import Simulation


@dataclass(slots=True)
class Flight:
    """A tensor that a rank has submitted and that is not through."""

    occurrence: int
    request: Request
    slot: int | None  # of a hit


class Rank:
    """One rank: the shell around a Member, as ronde.engine is one."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation, self.workload, self.hot = simulation, simulation.workload, simulation.hot
        self.rank = rank
        self.member = Member(rank, self.workload.ranks)
        self.flights: dict[int, Flight] = {}  # by name
        self.slots: dict[int, tuple[Request, Run]] = {}  # the cache of the hot path
        self.hits: dict[int, int] = {}  # by slot: the name
        self.next_occurrence = [0] * len(self.workload.operations)
        self.available = list(range(len(self.workload.operations)))  # names that may be submitted now
        self.outcomes = 0  # how far it has come in the common order
        self.state = "running"
        self.is_leaving = False
        self.leaves_early_after = -1  # submissions
        self.has_to_want = False
        self.position = self.place = 0  # in the log, and in the entry there or the current round
        self.log_end: int | None = None  # where the log ends for this rank, if rank 0 has died
        self.begun = 0
        self.round: ColdRound | None = None
        self.stream: list[StreamItem] | None = None
        self.used: list[int] = []

    # The training thread.

    def train(self) -> bool:
        """One step of the training thread; False if it waits."""
        if self.has_to_want:
            self.has_to_want = False
            self.want_round()
        elif self.is_leaving:
            return False
        elif self.leaves_early_after == 0 or (not self.available and not self.flights):
            self.is_leaving = True
            self.simulation.counts["left too early"] += bool(self.available or self.flights)
            self.member.leave()
            self.has_to_want = True
        elif self.available:
            self.submit()
        else:
            return False
        return True

    def submit(self) -> None:
        rng = self.simulation.rng
        which = int(rng.random() * len(self.available))
        self.available[which], self.available[-1] = self.available[-1], self.available[which]
        index = self.available.pop()
        occurrence = self.next_occurrence[index]
        self.next_occurrence[index] += 1
        self.leaves_early_after -= 1
        request = self.workload.operations[index][occurrence].request(self.rank)
        slot = self.member.submit(request)
        self.flights[index] = Flight(occurrence, request, slot)
        self.simulation.note(self.rank, "submits", request, "hit on" if slot is not None else "miss", slot)
        if slot is None:
            self.has_to_want = True
        else:
            require(slot not in self.hits, "rank", self.rank, "hits slot", slot, "twice")
            self.hits[slot] = index
            self.hot.set_bit(slot)
            self.simulation.wake_leader()

    def want_round(self) -> None:
        self.hot.want_round(self.begun + 1)
        self.simulation.wake_leader()

    def finish(self, index: int) -> Flight:
        """A submission is through, well or not."""
        require(index in self.flights, "rank", self.rank, "is through with", index, "which is not in flight")
        flight = self.flights.pop(index)
        operations = self.workload.operations
        if not self.workload.in_steps:
            if self.next_occurrence[index] < len(operations[index]):
                self.available.append(index)
        elif not self.flights and not self.available and flight.occurrence + 1 < len(operations[index]):
            self.available = list(range(len(operations)))
        self.simulation.wake_training(self.rank)
        return flight

    # The engine.

    def advance(self) -> bool:
        """One step of the engine; False if it waits."""
        if self.round is not None:
            return self.apply_next(self.round)
        end = len(self.hot.log) if self.log_end is None else self.log_end
        if self.position >= end:
            return False
        entry = self.hot.log[self.position]
        if isinstance(entry, ColdRound):
            self.position += 1
            self.begin(entry)
            return True
        slot = entry[self.place]
        self.place += 1
        if self.place == len(entry):
            self.position, self.place = self.position + 1, 0
        self.execute_hit(slot)
        return True

    def execute_hit(self, slot: int) -> None:
        require(slot in self.hits, "slot", slot, "is decided, which rank", self.rank, "has not submitted")
        del self.hits[slot]
        self.used.append(slot)
        self.simulation.counts["hits executed"] += self.rank == 0
        self.execute(*self.slots[slot])

    def begin(self, round_: ColdRound) -> None:
        self.begun += 1
        self.round, self.place = round_, 0
        outbox: list[Message] = self.member.outbox()
        if self.workload.through_the_codec:
            outbox = decode_requests(encode_requests(outbox))
        self.simulation.hand_over(round_, self.rank, outbox)

    def apply_next(self, round_: ColdRound) -> bool:
        if self.stream is None:
            if round_.stream is None or self.log_end is not None:  # the dead rank 0 had not told this one
                return False
            self.stream = list(round_.stream)
            if self.workload.through_the_codec:
                self.stream = decode_stream(encode_stream(self.stream))
        if self.place < len(self.stream):
            item = self.stream[self.place]
            self.place += 1
            self.simulation.note(self.rank, "applies", item)
            for effect in self.member.apply(item):
                if self.state == "running":
                    self.perform(effect)
        else:
            self.round, self.stream, self.place = None, None, 0
            self.check_replica(round_)
            round_.through += 1
            self.simulation.wake_leader()
        return True

    def check_replica(self, round_: ColdRound) -> None:
        """After a cold round all ranks have cached the same, and what the coordinator believes."""
        names = self.member.names()
        require(names == round_.cache, "rank", self.rank, "has cached", names, "not", round_.cache)
        require(names.keys() == self.slots.keys(), "rank", self.rank, "has told the hot path of", self.slots)
        for slot, entry in self.slots.items():
            cached = self.member.lookup(names[slot])
            require(
                cached == (*entry, slot), "rank", self.rank, "has cached", cached, "and slot", slot, entry
            )
        replica = {slot: run for slot, (_, run) in self.slots.items()}
        if round_.first_replica is None:
            round_.first_replica = replica
        require(replica == round_.first_replica, "rank", self.rank, "has cached other responses")

    def perform(self, effect: Effect) -> None:
        match effect:
            case Insert(slot, request, run):
                require(slot not in self.slots, "slot", slot, "of rank", self.rank, "is inserted twice")
                self.slots[slot] = (request, run)
            case Execute(request, run):
                entry = self.slots.get(run.slot) if run.slot >= 0 else (request, run)
                require(entry == (request, run), effect, "comes before its insertion")
                self.execute(request, run)
            case Evicted(slot):
                self.simulation.counts["evictions"] += self.rank == 0
                del self.slots[slot]
                if slot in self.hits:
                    self.displace(slot)
            case Failed(request, reason, left):
                self.fail_one(request, reason, left)
            case Closed():
                require(
                    self.stream is None or self.place == len(self.stream), "something comes after a leave"
                )
                self.close("closed")

    def displace(self, slot: int) -> None:
        self.simulation.counts["displaced"] += 1
        self.hot.take_back_bit(slot)
        flight = self.flights[self.hits.pop(slot)]
        flight.slot = None
        self.member.displaced(flight.request)
        self.want_round()

    def execute(self, request: Request, run: Run) -> None:
        index = self.workload.index(request.name)
        if self.outcomes >= self.simulation.survivable:
            self.close("lost")  # a rank that has died or failed is missing in this collective
            return
        flight = self.finish(index)
        require(
            request == flight.request, "rank", self.rank, "executes", request, "instead of", flight.request
        )
        outcome = self.come_to(index, flight.occurrence, run)
        outcome.value += self.workload.contribution(self.rank, index, flight.occurrence)

    def come_to(self, index: int, occurrence: int, response: Run | str) -> Outcome:
        self.simulation.note(
            self.rank, "is through with", index, "occurrence", occurrence, "place", self.outcomes
        )
        outcome = self.simulation.order.come_to(self.outcomes, index, occurrence, response)
        self.outcomes += 1
        return outcome

    def fail_one(self, request: Request, reason: str, left: int) -> None:
        flight = self.finish(self.workload.index(request.name))
        require(request == flight.request, "rank", self.rank, "fails", request, "instead of", flight.request)
        require(flight.slot is None, "a hit fails:", request)
        if left < 0:
            self.come_to(self.workload.index(request.name), flight.occurrence, reason)
        else:
            self.simulation.counts["submissions lost"] += 1

    def close(self, state: str) -> None:
        """Nothing comes any more: what is in flight fails."""
        if state == "closed":
            require(all(flight.slot is not None for flight in self.flights.values()), "a miss is forgotten")
        self.simulation.counts["submissions lost"] += len(self.flights)
        self.flights.clear()
        self.simulation.stop(self, state)
