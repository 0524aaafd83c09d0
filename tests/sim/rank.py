"""A simulated rank: the shell around a Member, as ronde.engine is one, with a training thread that submits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.common_order import Outcome, require
from tests.sim.hot_path import NegotiationRound

from ronde.engine.messages import (
    AllJoined,
    FailTensor,
    Joined,
    Leaving,
    Message,
    Request,
    Run,
    StreamItem,
    Tune,
    decode_requests,
    decode_stream,
    encode_requests,
    encode_stream,
)
from ronde.engine.negotiation import Closed, Contribute, Effect, Evicted, Execute, Failed, Insert, Requester

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
        self.leader = self.hot.leader_of(rank)
        self.member = Requester(rank, self.workload.ranks)
        self.flights: dict[int, Flight] = {}  # by name
        self.slots: dict[int, tuple[Request, Run]] = {}  # the cache of the hot path
        self.hits: dict[int, int] = {}  # by slot: the name
        self.next_occurrence = [0] * len(self.workload.operations)
        self.available: list[int] = []  # names that may be submitted now
        self.epoch = -1
        self.is_joining = False
        self.begin_epoch()
        self.outcomes = 0  # how far it has come in the common order
        self.tunings = 0
        self.outcomes_of = [0] * len(self.workload.operations)
        self.state = "running"
        self.is_leaving = False
        self.leaves_early_after = -1  # submissions
        self.has_to_want = False
        self.is_absent = False
        self.position = self.place = 0  # in the log, and in the entry there or the current round
        self.is_cut_off = False  # rank 0 has died, and what it had decided in a round has not come here
        self.begun = 0
        self.round: NegotiationRound | None = None
        self.stream: list[StreamItem] | None = None
        self.used: list[int] = []

    # The training thread.

    def begin_epoch(self) -> None:
        self.epoch += 1
        epochs, names = self.workload.epochs, len(self.workload.operations)
        self.is_over = self.epoch == len(epochs)
        if self.is_over:
            return
        begin, count = epochs[self.epoch].begin, epochs[self.epoch].counts[self.rank]
        self.next_occurrence = [begin] * names
        self.limit = begin + count  # of occurrences
        self.available = list(range(names)) if count else []

    def has_submitted(self, index: int, occurrence: int) -> bool:
        return self.next_occurrence[index] > occurrence

    def has_submitted_all(self) -> bool:
        return not self.available and all(occurrence >= self.limit for occurrence in self.next_occurrence)

    def train(self) -> bool:
        """One step of the training thread; False if it waits."""
        if self.has_to_want:
            self.has_to_want = False
            self.want_round()
        elif self.is_leaving:
            return False
        elif self.leaves_early_after == 0 or self.is_over:
            self.simulation.leave()
            self.is_leaving = True
            self.simulation.counts["left too early"] += not self.is_over
            self.member.announce_leave()
            self.has_to_want = True
        elif self.is_joining:
            return False
        elif self.workload.has_joins and self.has_submitted_all():
            self.is_joining = self.has_to_want = True
            self.member.announce_join()
            self.simulation.note(self.rank, "joins")
        elif not self.workload.has_joins and self.has_submitted_all() and not self.flights:
            self.begin_epoch()
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
        site = f"train.py:{(index + self.rank) % 3}" if index % 2 else ""  # three lines in all
        slot = self.member.submit(request, site)
        self.flights[index] = Flight(occurrence, request, slot)
        self.simulation.note(self.rank, "submits", request, "hit on" if slot is not None else "miss", slot)
        if slot is None:
            self.has_to_want = True
        else:
            require(slot not in self.hits, "rank", self.rank, "hits slot", slot, "twice")
            self.hits[slot] = index
            self.hot.set_bit(self.rank, slot)

    def want_round(self) -> None:
        self.hot.want_round(self.rank, self.begun + 1)

    def finish(self, index: int) -> Flight:
        """A submission is through, well or not."""
        require(index in self.flights, "rank", self.rank, "is through with", index, "which is not in flight")
        flight = self.flights.pop(index)
        if not self.workload.in_steps:
            if self.next_occurrence[index] < self.limit:
                self.available.append(index)
        elif not self.flights and not self.available and flight.occurrence + 1 < self.limit:
            self.available = list(range(len(self.workload.operations)))
        self.simulation.wake_training(self.rank)
        return flight

    # The engine.

    def advance(self) -> bool:
        """One step of the engine; False if it waits."""
        if self.round is not None:
            return self.apply_next(self.round)
        if self.position >= self.leader.arrived:
            return False
        entry = self.hot.log[self.position]
        if isinstance(entry, NegotiationRound):
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
        self.used.append(slot)
        self.simulation.counts["hits executed"] += self.rank == 0
        if self.is_absent and slot in self.slots:
            require(slot not in self.hits, "rank", self.rank, "has joined and has a hit in flight")
            self.contribute(self.slots[slot][1])
            return
        require(slot in self.hits, "slot", slot, "is decided, which rank", self.rank, "has not submitted")
        del self.hits[slot]
        self.execute(*self.slots[slot])

    def begin(self, round_: NegotiationRound) -> None:
        self.begun += 1
        self.round, self.place = round_, 0
        if self.member.takes_back_hits:
            for slot in list(self.hits):
                self.displace(slot)
        outbox: list[Message] = self.member.take_outbox()
        if self.workload.through_the_codec:
            outbox = decode_requests(encode_requests(outbox))
        self.simulation.hand_over(round_, self.rank, outbox)

    def apply_next(self, round_: NegotiationRound) -> bool:
        if self.stream is None:
            if round_.stream is None or self.is_cut_off:
                return False
            self.stream = list(round_.stream)
            if self.workload.through_the_codec:
                self.stream = decode_stream(encode_stream(self.stream))
        if self.place < len(self.stream):
            item = self.stream[self.place]
            self.place += 1
            self.simulation.note(self.rank, "applies", item)
            effects = self.member.apply_item(item)
            for effect in effects:
                if self.state == "running":
                    self.perform(effect)
            if isinstance(item, FailTensor) and not effects:
                self.come_to_absent(self.workload.index(item.name), item.reason)
        else:
            self.round, self.stream, self.place = None, None, 0
            self.check_replica(round_)
            self.hot.is_through(self.rank, round_)
        return True

    def check_replica(self, round_: NegotiationRound) -> None:
        """After a negotiation round all ranks have cached the same, and what the coordinator believes."""
        names = self.member.cached_names()
        require(names == round_.cache, "rank", self.rank, "has cached", names, "not", round_.cache)
        require(names.keys() == self.slots.keys(), "rank", self.rank, "has told the hot path of", self.slots)
        for slot, entry in self.slots.items():
            cached = self.member.cached_response(names[slot])
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
            case Contribute(run):
                self.contribute(run)
            case Failed(request, reason, left):
                self.fail_one(request, reason, left)
            case Joined() | AllJoined():
                self.hear_of_joins(effect)
            case Tune():
                self.simulation.order.tune(self.tunings, self.outcomes, effect)
                self.tunings += 1
            case Leaving():
                self.want_round()
            case Closed():
                require(
                    self.stream is None or self.place == len(self.stream), "something comes after a leave"
                )
                self.close("closed")

    def hear_of_joins(self, effect: Joined | AllJoined) -> None:
        if isinstance(effect, Joined):
            if self.rank in effect.ranks:
                self.is_absent = True
                self.hot.note_joined(self.rank, True)
            return
        require(self.is_absent and not self.flights, "rank", self.rank, "goes on before all is done")
        require(0 <= effect.last < self.workload.ranks, "an unknown rank has joined:", effect.last)
        self.is_absent = self.is_joining = False
        self.hot.note_joined(self.rank, False)
        self.simulation.counts["all joined"] += self.rank == 0
        self.begin_epoch()
        self.simulation.wake_training(self.rank)

    def displace(self, slot: int) -> None:
        self.simulation.counts["displaced"] += 1
        self.hot.take_back_bit(self.rank, slot)
        flight = self.flights[self.hits.pop(slot)]
        flight.slot = None
        self.member.request_again(flight.request)
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

    def contribute(self, run: Run) -> None:
        """Take part in what this rank has no data for."""
        require(self.is_absent, "rank", self.rank, "is absent from", run)
        if self.outcomes >= self.simulation.survivable:
            self.close("lost")
            return
        self.come_to_absent(self.workload.index(run.request.name), run)

    def come_to_absent(self, index: int, response: Run | str) -> None:
        require(self.is_absent, "rank", self.rank, "has not requested", index)
        self.come_to(index, self.outcomes_of[index], response)

    def come_to(self, index: int, occurrence: int, response: Run | str) -> Outcome:
        self.simulation.note(
            self.rank, "is through with", index, "occurrence", occurrence, "place", self.outcomes
        )
        outcome = self.simulation.order.come_to(self.outcomes, index, occurrence, response)
        self.outcomes += 1
        self.outcomes_of[index] += 1
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
