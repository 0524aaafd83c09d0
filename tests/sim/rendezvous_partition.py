"""Simulates nodes that lose sight of each other: the store is where one of them is, and others may be cut off from it.

    python -m tests.sim.rendezvous_partition --seeds 100000
    python -m tests.sim.rendezvous_partition --seed 7 --nodes 5

Every node can serve a store. At random moments the nodes are divided into sides, some only for a moment, some
repeatedly; nodes die with their stores, freeze, and come late. A node that no longer reaches the store notices that
after some seconds, and does what the shell does: it searches for the store, and moves to the store of another node if
the listeners of more than half of the nodes that may live are open. Nodes of a settled job call others from the first
store as soon as they reach it.

Beside `rendezvous_checks`, these checks hold for all stores together: no round begins twice, and each round has enough
nodes of the round begun before it, at whatever store, that no other round could have begun instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from tests.sim.common_order import require
from tests.sim.rendezvous import BAD_TIMES_NS, Simulation, main
from tests.sim.rendezvous_checks import Checks
from tests.sim.rendezvous_node import KNOCK_NS, S, SimNode
from tests.sim.rendezvous_store import SimStore, Values

from ronde.rendezvous.effects import Compare, Effect, NotifyAgent, Probe
from ronde.rendezvous.membership import Budget, Round
from ronde.rendezvous.state import STATE, Cause, JobPhase, JobState, decode_roster, decode_state

SILENCE_NS = 6 * S  # after which a connection breaks
SEARCH_NS = 60 * S
LINGER_NS = 2 * S


class PlaceStore(SimStore):
    """The store of one node, which reports the decisions made there."""

    def __init__(self, sim: Partition, name: str) -> None:
        super().__init__()
        self.sim = sim
        self.name = name
        self.is_shut = False

    def execute(self, client: str, effect: Effect) -> Values | bytes | None:
        before = self.values.get(STATE)
        result = super().execute(client, effect)
        if isinstance(effect, Compare) and result == effect.desired != before:
            self.sim.decided(self, decode_state(before) if before else None, decode_state(effect.desired))
        return result


class PartitionChecks(Checks):
    """Checks for partitions: nodes may give up for more reasons, which are only counted. The sides may see different
    ends of the job, and a node that does not see its completion may go on.
    """

    def began(self, node: SimNode, round: Round) -> None:
        super().began(node, round)
        now_ns = node.sim.now_ns
        for other in node.sim.nodes:
            works = other.round and other.round.number not in other.succeeded
            if other.is_alive and other.round and works and other.round.number < round.number:
                excused = other.is_frozen or other.is_leaving or other.thawed_ns + S > now_ns
                require(excused, other.name, "still works in round", other.round.number, "in", round.number)

    def ended(self, node: SimNode, number: int, cause: Cause) -> None:
        self.causes.clear()
        self.completed = None
        super().ended(node, number, cause)

    def may_lose(self, node: SimNode, other: SimNode) -> bool:
        return other.is_harmed or other.place is not node.place

    def all_succeeded(self, node: SimNode, number: int) -> None:
        self.causes.clear()
        self.completed = None
        super().all_succeeded(node, number)

    def gave_up(self, node: SimNode, nodes: object) -> None:
        node.sim.counts["gave up"] += 1

    def wrote(self, node: SimNode, state: JobState) -> None:
        pass  # the end of its side only, for all that it knows

    def outcome(self, node: SimNode) -> str:
        self.completed = None
        return super().outcome(node)


class MovingNode(SimNode):
    """A node with the rules of the shell for a store that is lost."""

    sim: Partition

    def __init__(self, sim: Partition, host: int, start: int) -> None:
        super().__init__(sim, host, start)
        self.own = sim.store if host == start == 0 else PlaceStore(sim, self.node.id)
        self.is_searching = self.broke_now = False
        self.were_there: list[str] | None = None

    def reaches(self, place: SimStore) -> bool:
        return self.sim.side_of(self) == self.sim.side_of(self.sim.owner(place))

    def hold(self) -> None:
        if self.reaches(self.place):
            super().hold()

    def lose_sight(self) -> None:
        """Messages under way do not arrive; after a while both ends notice the break."""
        self.store += 1
        self.watches += 1
        self.queue, self.is_busy = None, True
        self.is_searching = True
        self.harm()
        place, client, store = self.place, self.node.id, self.store

        def lost() -> None:
            place.lose(client)

        self.sim.at(self.sim.now_ns + SILENCE_NS + self.sim.rng.randrange(2 * S), lost)
        has_broken = self.reaches(place)
        delay_ns = 0 if has_broken else SILENCE_NS + self.sim.rng.randrange(2 * S, 5 * S)

        def notice() -> None:
            self.broke_now = has_broken and self.participant.store_silence.is_fresh(self.now_ns())
            self.were_there = self.participant.store_identity.present_nodes
            self.participant.lose_store(self.broke_now)

        self.later(max(delay_ns - 2 * S, 0), notice)
        self.later(delay_ns, lambda: self.search(store, 0))

    def search(self, store: int, waited_ns: int) -> None:
        if store != self.store or self.outcome:
            return
        if self.reaches(self.place) and not self.sim.is_shut(self.place):
            self.enter(self.place, (), False)
            return
        roster = self.participant.roster
        addresses = {node.id: self.sim.probe_result(self, node.id) for node in roster}
        were_there = self.were_there if self.broke_now and not waited_ns else None
        shut = [node for node, result in addresses.items() if result == "shut" and were_there is not None]
        gone = [node for node in shut if node in (were_there or ()) or self.sim.owns(node) is self.place]
        are_open = [node for node, result in addresses.items() if result == "open"]
        others = [node for node in are_open if self.sim.owns(node) is not self.place]
        if 2 * len(are_open) > len(roster) - len(gone) and others:
            self.enter(self.sim.owns(others[0]), gone, True)
        elif waited_ns > SEARCH_NS:
            self.perform(self.participant.give_up("lost"))
        else:
            self.later(KNOCK_NS, lambda: self.search(store, waited_ns + KNOCK_NS))

    def enter(self, place: SimStore, gone: list[str] | tuple[str, ...], elsewhere: bool) -> None:
        self.sim.note(self.name, "goes to" if elsewhere else "comes back to", self.sim.owner(place).name)
        self.sim.counts["moves"] += elsewhere
        self.to_hold = {}
        self.place = place
        self.operations.clear()
        self.is_busy = self.is_searching = False
        self.joined_ns = self.sim.now_ns
        self.perform(self.participant.enter_store(self.now_ns(), gone, elsewhere=elsewhere))

    def follow(self, place: SimStore) -> None:
        self.sim.counts["called"] += 1
        self.sim.note(self.name, "is called to", self.sim.owner(place).name)
        self.place.lose(self.node.id)
        self.store += 1
        self.watches += 1
        self.place = place
        self.operations.clear()
        self.queue, self.is_busy = None, False
        self.harm()
        self.perform(self.participant.enter_store(self.now_ns(), forget="it goes on elsewhere"))

    def perform(self, effects: list[Effect]) -> None:
        if not self.is_searching:
            super().perform(effects)
            return
        for effect in effects:
            if isinstance(effect, Probe):
                self.probe_agents(effect)
            elif isinstance(effect, NotifyAgent):
                self.told(effect.event)
        self.schedule_tick()

    def start(self) -> None:
        if not self.is_searching and not self.reaches(self.place):
            self.lose_sight()
        super().start()

    def die(self, is_noticed: bool) -> None:
        super().die(is_noticed)
        self.sim.at(self.sim.now_ns + (LINGER_NS if self.outcome else 1), lambda: self.sim.lose_place(self))


class Partition(Simulation):
    module = "tests.sim.rendezvous_partition"
    node_type = MovingNode

    def __init__(self, seed: int, nodes: int) -> None:
        self.sides: dict[int, int] = {}  # by host
        self.begun: dict[int, tuple[str, ...]] = {}  # all rounds, of whatever store
        self.decisions: list[tuple[int, tuple[str, ...], PlaceStore]] = []
        self.roster_keys: set[tuple[SimStore, str]] = set()
        super().__init__(seed, nodes)

    def draw_fates(self, nodes: int) -> None:
        rng = self.rng
        least = min(self.rules.min_nodes, max(1, nodes // 2))
        self.rules = replace(self.rules, rehost=True, min_nodes=least)
        self.budget = Budget(10, -1)
        self.checks = PartitionChecks(self.rules, self.budget)
        self.failing = 0.0
        for node in self.nodes:
            node.participant = type(node.participant)(self.rules)
        at_ns = 0
        for _ in range(rng.choice((1, 1, 2, 4))):
            at_ns += rng.randrange(BAD_TIMES_NS // 2)
            self.at(at_ns, self.part)
            at_ns += rng.choice((2 * S, 8 * S, 12 * S, 30 * S, 60 * S))
            self.at(at_ns, self.heal)
        for _ in range(rng.choice((0, 0, 1, 2))):
            fates = (self.kill, self.kill, self.power_off, self.freeze, self.leave)
            self.at(rng.randrange(BAD_TIMES_NS), rng.choice(fates))
        for late in range(rng.choice((0, 0, 1, 2))):
            self.at(rng.randrange(BAD_TIMES_NS), lambda late=late: self.add(nodes + late, 0))  # type: ignore[misc]
        self.at(S, self.call)
        if rng.random() < 0.1:
            self.at(rng.randrange(BAD_TIMES_NS), self.end_job)

    @property
    def store(self) -> SimStore:
        return self._store

    @store.setter
    def store(self, _: SimStore) -> None:
        self._store = PlaceStore(self, "n0.0")

    def come(self, node: SimNode) -> None:
        """A node that finds no others at the first store would begin another job."""
        if self.is_shut(self.store):
            node.is_alive = False
        else:
            super().come(node)

    def draw_work(self, node: SimNode) -> tuple[int, Callable[[], None]]:
        delay_ns, do = super().draw_work(node)
        return (delay_ns + BAD_TIMES_NS if self.now_ns < BAD_TIMES_NS else delay_ns), do

    # The places of nodes

    def owner(self, place: SimStore) -> SimNode:
        assert isinstance(place, PlaceStore)
        return self.by_id(place.name)

    def owns(self, node: str) -> SimStore:
        found = self.by_id(node)
        assert isinstance(found, MovingNode)
        return found.own

    def side_of(self, node: SimNode) -> int:
        return self.sides.get(node.host, 0)

    def is_shut(self, place: SimStore) -> bool:
        assert isinstance(place, PlaceStore)
        return place.is_shut

    def probe_result(self, node: SimNode, other: str) -> str:
        return (
            super().probe_result(node, other)
            if self.side_of(self.by_id(other)) == self.side_of(node)
            else "silent"
        )

    # Fates

    def part(self) -> None:
        hosts = {node.host for node in self.nodes}
        some = self.rng.randint(2, 3)
        self.sides = {host: self.rng.randrange(some) for host in hosts}
        self.counts["partitions"] += 1
        self.note(
            "the nodes", "are parted", {node.name: self.side_of(node) for node in self.nodes if node.is_alive}
        )
        self.notice()

    def heal(self) -> None:
        self.note("the nodes", "reach each other again")
        self.sides = {}

    def notice(self) -> None:
        for node in self.nodes:
            assert isinstance(node, MovingNode)
            if node.is_alive and node.participant.has_joined and not node.is_searching:
                if not node.reaches(node.place) or self.is_shut(node.place):
                    node.lose_sight()

    def lose_place(self, dead: MovingNode) -> None:
        assert isinstance(dead.own, PlaceStore)
        if not dead.own.is_shut:
            dead.own.is_shut = True
            self.notice()

    def call(self) -> None:
        """The node that serves the settled job's store calls the nodes at the first store."""
        for node in self.nodes:
            assert isinstance(node, MovingNode)
            is_caller = (
                node.is_alive and node.place is node.own and node.participant.store_identity.is_redirecting
            )
            if (
                is_caller
                and node.own is not self.store
                and node.reaches(self.store)
                and not self.is_shut(self.store)
            ):
                for other in self.nodes:
                    assert isinstance(other, MovingNode)
                    there = other.place is self.store and other.reaches(self.store) and not other.is_searching
                    if there and other.is_alive and not other.is_frozen and other.participant.has_joined:
                        other.follow(node.own)
        self.at(self.now_ns + S, self.call)

    # Decisions

    def decided(self, place: PlaceStore, before: JobState | None, state: JobState) -> None:
        if state.roster is None or not state.is_open:
            return
        self.forget_unknown_decisions()
        has_met = before is not None and before.has_moved and not state.has_moved
        if has_met and self.decisions and self.decisions[-1][0] == state.roster.number:
            # More than half have moved there without a new round.
            self.decisions[-1] = (*self.decisions[-1][:2], place)
        if state.phase != JobPhase.RUNNING:
            return
        key = place, state.roster.prefix
        parts = [place.values.get(each) for each in state.roster.keys]
        nodes = tuple(node.id for node in decode_roster(tuple(part for part in parts if part)))
        if key in self.roster_keys or self.begun.get(state.number) == nodes:
            self.roster_keys.add(key)
            return
        self.roster_keys.add(key)
        # Newcomers that take over after the end of all nodes do not know the rounds that these had begun elsewhere.
        if earlier := self.begun.get(state.number):
            is_over = not any(self.by_id(node).is_alive for node in earlier)
            require(is_over, "round", state.number, "begins twice:", nodes, self.begun)
            self.checks.forget(state.number)
        self.begun[state.number] = nodes
        if self.decisions:
            _, last, where = self.decisions[-1]
            living = [node for node in last if self.by_id(node).is_alive]
            there = sum(node in nodes or self.by_id(node).place is place for node in living)
            enough = 2 * there > len(living) or (2 * there == len(living) and place is where) or not living
            require(enough, "two worlds: after", last, "comes", nodes, "of which only", there)
        self.decisions.append((state.number, nodes, place))

    def forget_unknown_decisions(self) -> None:
        """Forget the decisions in a store that died before any node received them."""
        known = [node.participant.state for node in self.nodes if node.is_alive]
        latest = max((state.roster.number for state in known if state and state.roster), default=-1)
        while self.decisions and self.decisions[-1][2].is_shut and self.decisions[-1][0] > latest:
            self.decisions.pop()


if __name__ == "__main__":
    sys.exit(main(kind=Partition))
