"""Simulates the negotiation: the real Coordinator and Members, up to 10,000 of them, under a seeded scheduler.

    python -m tests.sim.negotiation --seeds 10000          # some hundred run with the quick tests, this by night
    python -m tests.sim.negotiation --seed 7 --ranks 64    # again what has failed; the last events are printed

Every rank has two actors: a training thread, which submits tensors in an order of its own, and an engine, which reads
the log of the hot path entry by entry, and negotiation rounds item by item. A third kind, once per host, is its leader
looking for what to report, to pass on or (rank 0) to decide; hosts lie in a tree of any shape. The scheduler picks any
actor that has something to do (sometimes one that has not), some ranks rarely, and lets it do a few steps. In some
simulations a rank dies anywhere, in others one leaves too early; otherwise all leave at the end.

What is checked, as it happens: all ranks execute the same responses, or get the same errors, in the same order; each is
what the workload says; values are right; caches are equal after every negotiation round; a submission ends once. At the
end: nothing was lost, and if one has left too early, nothing that all had submitted by then. After a death: survivors
execute only what all had begun, in the common order, and then all fail.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Sequence

from tests.sim import command
from tests.sim.common_order import CommonOrder, require
from tests.sim.hot_path import HotPath, NegotiationRound
from tests.sim.leaders import draw_placement
from tests.sim.rank import Rank
from tests.sim.workload import draw_ranks, draw_workload

from ronde.engine.messages import Message, Tune
from ronde.engine.negotiation import Coordinator


class Actors:
    """Those that may have something to do; any can be picked, added and removed in constant time."""

    def __init__(self, count: int) -> None:
        self._list = list(range(count))
        self._places: list[int] = list(range(count))  # -1: not in the list

    def __len__(self) -> int:
        return len(self._list)

    def pick(self, rng: random.Random) -> int:
        return self._list[int(rng.random() * len(self._list))]

    def add(self, actor: int) -> None:
        if self._places[actor] < 0:
            self._places[actor] = len(self._list)
            self._list.append(actor)

    def remove(self, actor: int) -> None:
        place = self._places[actor]
        if place >= 0:
            last = self._list.pop()
            if last != actor:
                self._list[place] = last
                self._places[last] = place
            self._places[actor] = -1


class Simulation:
    def __init__(self, seed: int, ranks: int) -> None:
        self.rng = random.Random(f"{ranks} ranks with {seed}")
        self.workload = draw_workload(self.rng, ranks)
        self.placement = draw_placement(self.rng, ranks)
        self.hot = HotPath(
            self.placement, self.rng, self.workload.capacity, self.wake_leader, self.wake_engines
        )
        self.coordinator = Coordinator(ranks, self.workload.capacity)
        self.counts: Counter[str] = Counter()
        self.events: deque[tuple[object, ...]] = deque(maxlen=60)
        self.order = CommonOrder(self.workload, self.counts)
        # What all ranks had submitted when the first one left: index, occurrence.
        self.due: list[tuple[int, int]] = []
        self.survivable = sys.maxsize  # a collective at this place of the order lacks a rank that has failed
        # + host: its leader; 2 * rank: its training thread; 2 * rank + 1: its engine.
        self.first_leader = 2 * ranks
        self.actors = Actors(2 * ranks + len(self.hot.leaders))
        self.ranks = [Rank(self, rank) for rank in range(ranks)]
        share = self.rng.choice((0, 0, 0.1, 0.5))
        self.slow = {rank for rank in range(ranks) if self.rng.random() < share}
        self.steps = 0
        work = (self.workload.total + len(self.workload.epochs)) * ranks
        self.most_steps = 1_000 * (10 + work)
        self.dies_after: int | None = None  # steps
        self.has_lost_one = False
        self.draw_fate()

    def draw_fate(self) -> None:
        """Does a rank die, or leave before it is through?"""
        total = self.workload.total
        fate = self.rng.random()
        if fate < 0.2 and len(self.ranks) > 1:
            # Where roughly the end will be.
            self.dies_after = int(self.rng.random() * 4 * len(self.ranks) * total)
        elif fate < 0.35:
            self.rng.choice(self.ranks).leaves_early_after = self.rng.randint(0, total)

    def note(self, rank: int, *what: object) -> None:
        self.events.append((f"rank {rank}", *what))

    def wake_leader(self, host: int) -> None:
        if self.ranks[self.placement.ranks_of_host[host][0]].state == "running":
            self.actors.add(self.first_leader + host)

    def wake_training(self, rank: int) -> None:
        self.actors.add(2 * rank)

    def wake_engines(self, host: int) -> None:
        for rank in self.placement.ranks_of_host[host]:
            if self.ranks[rank].state == "running":
                self.actors.add(2 * rank + 1)

    def run(self) -> Counter[str]:
        """Run to the end; returns what happened how often. Raises Broken, or whatever a machine raises."""
        while self.actors:
            actor = self.actors.pick(self.rng)
            self.count_step()
            if actor // 2 in self.slow and self.rng.random() < 0.95 and len(self.actors) > 1:
                continue
            for _ in range(1 if self.rng.random() < 0.5 else self.rng.randint(2, 12)):
                self.count_step()
                if not self.step(actor):
                    self.actors.remove(actor)
                    break
            if self.rng.random() < 0.02:
                self.wake_for_nothing()
        for rank in self.ranks:
            if self.has_lost_one and rank.state == "running":
                rank.close("lost")  # nothing is left to do but to notice
        self.check_end()
        return self.counts

    def count_step(self) -> None:
        self.steps += 1
        if self.steps == self.dies_after:
            self.die()
        require(self.steps < self.most_steps, "it goes on for ever")

    def step(self, actor: int) -> bool:
        if actor >= self.first_leader:
            return self.hot.step(actor - self.first_leader)
        rank = self.ranks[actor // 2]
        if rank.state != "running":
            return False
        if self.has_lost_one and self.rng.random() < 0.01:
            rank.close("lost")  # it notices
            return False
        return rank.advance() if actor % 2 else rank.train()

    def wake_for_nothing(self) -> None:
        rank = self.ranks[self.rng.randrange(len(self.ranks))]
        if rank.state == "running":
            self.actors.add(2 * rank.rank + self.rng.randrange(2))

    def stop(self, rank: Rank, state: str) -> None:
        """This rank executes nothing any more."""
        self.note(rank.rank, "is", state)
        rank.state = state
        self.actors.remove(2 * rank.rank)
        self.actors.remove(2 * rank.rank + 1)
        leader = rank.leader
        if self.placement.ranks_of_host[leader.host][0] == rank.rank:
            self.actors.remove(self.first_leader + leader.host)
            for child in leader.children:  # what it had passed on is still on its way
                below = self.hot.leaders[child]
                below.arrives_up_to = self.rng.randint(below.arrived, max(leader.arrived, below.arrived))
        if state != "closed":
            self.survivable = min(self.survivable, rank.outcomes)

    def leave(self) -> None:
        """A rank leaves. What all have submitted by now has to run, whoever leaves."""
        if any(rank.is_leaving for rank in self.ranks):
            return
        for index, occurrence in [
            (index, flight.occurrence) for index, flight in self.ranks[0].flights.items()
        ]:
            if all(rank.has_submitted(index, occurrence) for rank in self.ranks):
                self.due.append((index, occurrence))

    def die(self) -> None:
        running = [rank for rank in self.ranks if rank.state == "running"]
        if not running:
            return
        dead = self.rng.choice(running)
        self.has_lost_one = True
        self.counts["deaths"] += 1
        dead.flights.clear()
        self.stop(dead, "dead")
        if dead.rank == 0:
            for rank in running:
                rank.is_cut_off = self.rng.random() < 0.7

    def hand_over(self, round_: NegotiationRound, rank: int, outbox: Sequence[Message]) -> None:
        self.note(rank, "hands over", outbox)
        if self.hot.hand_over(round_, rank, outbox) and self.ranks[0].state == "running":
            self.counts["negotiation rounds"] += 1
            used, self.ranks[0].used = self.ranks[0].used, []
            if self.rng.random() < 0.1:
                self.coordinator.tune(Tune(*[self.rng.randrange(1 << 30)] * 7))
            self.hot.coordinate(round_, self.coordinator, used, self.workload.through_the_codec)
            require(len(round_.cache) <= self.workload.capacity, "more is cached than there are slots")
            self.counts["warnings"] += len(self.coordinator.take_warnings())
            require(self.counts["warnings"] <= 3, "a pair of the three lines is warned about twice")
            for host in range(len(self.hot.leaders)):
                self.wake_engines(host)

    def check_end(self) -> None:
        for rank in self.ranks:
            where = f"rank {rank.rank} is {rank.state} after {rank.outcomes} of {self.workload.total},"
            if not self.has_lost_one:
                require(rank.state == "closed", where, "waits for ever, and has in flight", rank.flights)
                require(rank.outcomes == len(self.order), where, "and others came further")
            require(not rank.flights, where, "and has in flight", rank.flights)
        if not self.has_lost_one and not self.counts["left too early"]:
            require(len(self.order) == self.workload.total, "only", len(self.order), "of all were decided")
            require(self.counts["submissions lost"] == 0, "submissions were lost")
        if not self.has_lost_one:
            self.order.check_contains(self.due)
        self.order.check_end()


def simulate(seed: int, ranks: int) -> Counter[str]:
    """Run one simulation; returns what happened how often. Raises Broken with the command that does it again."""
    return command.run(Simulation(seed, ranks), f"tests.sim.negotiation --seed {seed} --ranks {ranks}")


def main(argv: Sequence[str] | None = None) -> int:
    about = "Simulate the negotiation with the real machines."
    return command.main(argv, about, "ranks", simulate, draw_ranks)


if __name__ == "__main__":
    sys.exit(main())
