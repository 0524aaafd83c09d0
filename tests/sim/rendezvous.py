"""Simulates rendezvous: the real machines of up to 1,000 nodes over a store, in virtual time, under a seeded scheduler.

    python -m tests.sim.rendezvous --seeds 100000              # some hundred run with the quick tests, this by night
    python -m tests.sim.rendezvous --seeds 20 --nodes 1000     # and this; a few with the slow tests
    python -m tests.sim.rendezvous --seed 7 --nodes 64         # replay a failure, and print its last events

Every clock has another origin and rate, messages take random times, operations of the store fail (and may have been
carried out), and clients lose values that they have popped. Nodes come late, die with or without a broken connection,
come back with another id, freeze and thaw, lose their connection for a moment, leave, or end the job; half of these
faults hit the leader. Workers run for a while, fail, blame others, or succeed. After some time the faults cease, and
every job must end.

The checks are those of `rendezvous_checks`, and that every living node knows the end of the job within a bounded time.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.sim import command
from tests.sim.common_order import Broken
from tests.sim.rendezvous_checks import Checks
from tests.sim.rendezvous_node import MS, S, SimNode
from tests.sim.rendezvous_store import SimStore

from ronde.rendezvous.effects import Set
from ronde.rendezvous.membership import Budget, Rules
from ronde.rendezvous.state import STATE, decode_state

BAD_TIMES_NS = 90 * S
JOIN_TIMEOUT_NS = 120 * S
# After the bad times: a last freeze, silence, stragglers, last call, work, and nodes that do not come.
BOUND_NS = BAD_TIMES_NS + 600 * S


class Simulation:
    node_type: Callable[[Any, int, int], SimNode] = SimNode
    module = "tests.sim.rendezvous"

    def __init__(self, seed: int, nodes: int) -> None:
        self.rng = rng = random.Random(f"{nodes} nodes with {seed}")
        self.crowd = max(1.0, nodes / 30)  # with many nodes each fault is rarer, or nothing else would happen
        self.now_ns = 0
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.planned = 0
        self.counts: Counter[str] = Counter()
        self.events: deque[tuple[object, ...]] = deque(maxlen=80)
        self.store = SimStore()
        self.restarted_ns = -BAD_TIMES_NS  # when it was away last
        least = rng.choice((1, 1, max(nodes // 2, 1), max(nodes - 1, 1), nodes))
        most = rng.choice((nodes, nodes, nodes + 2, max(nodes - 1, least)))
        self.rules = Rules(
            min_nodes=least,
            max_nodes=most,
            spares=rng.choice((0, 1)),
            join_timeout_ns=JOIN_TIMEOUT_NS,
            last_call_ns=rng.choice((0, S, 20 * S)),
        )
        self.budget = Budget(rng.choice((0, 2, 10)), rng.choice((-1, -1, -1, 3)))
        self.checks = Checks(self.rules, self.budget)
        self.typical_ns = rng.choice((100_000, MS, 20 * MS))
        self.hiccup = rng.choice((0.0, 0.0, 0.003, 0.03))
        self.failing = rng.choice((0.0, 0.0, 0.3))
        self.nodes = [self.node_type(self, host, 0) for host in range(nodes)]
        self.ids: dict[str, SimNode] = {}
        spread_ns = rng.choice((1, S, 30 * S))
        for node in self.nodes:
            node.later(rng.randrange(spread_ns), lambda node=node: self.come(node))  # type: ignore[misc]
        self.draw_fates(nodes)

    def draw_fates(self, nodes: int) -> None:
        rng = self.rng
        for _ in range(rng.choice((0, 1, 1, 2, 5, 10))):
            fates = (self.kill, self.kill, self.power_off, self.freeze, self.freeze, self.cut, self.leave)
            self.at(rng.randrange(BAD_TIMES_NS), rng.choice((*fates, self.lose_store, self.restart_store)))
        for late in range(rng.choice((0, 0, 1, 3))):
            self.at(rng.randrange(BAD_TIMES_NS), lambda late=late: self.add(nodes + late, 0))  # type: ignore[misc]
        chance = rng.random()
        if chance < 0.2:
            end = self.end_job if chance < 0.1 else self.freeze_and_end_job
            self.at(rng.randrange(BAD_TIMES_NS), self.end_job_without_leader if chance > 0.15 else end)

    # Faults

    def at(self, at_ns: int, do: Callable[[], None]) -> None:
        self.planned += 1
        heapq.heappush(self.agenda, (at_ns, self.planned, do))

    def note(self, *what: object) -> None:
        self.events.append((f"{self.now_ns / S:.3f}", *what))

    def latency_ns(self) -> int:
        return int(self.rng.expovariate(1 / self.typical_ns)) + 1000

    def hiccups(self, crowd: float = 1.0) -> bool:
        has = self.hiccup > 0 and self.now_ns < BAD_TIMES_NS and self.rng.random() < self.hiccup / crowd
        self.counts["hiccups"] += has
        return has

    def by_id(self, node: str) -> SimNode:
        if node not in self.ids:
            self.ids |= {each.node.id: each for each in self.nodes}
        return self.ids[node]

    def probe_result(self, node: SimNode, other: str) -> str:
        """Return the result of this node's attempt to connect to the other node's agent."""
        found = self.by_id(other)
        return "silent" if found.has_no_power else "open" if found.is_alive else "shut"

    def freezes_before(self, node: SimNode, effect: Set) -> bool:
        """Sometimes stop a leader, or the store, at the worst moment: before the leader writes a roster."""
        is_roster = any(key.startswith("roster/") for key in effect.values)
        freezes = is_roster and self.now_ns < BAD_TIMES_NS and self.rng.random() < 0.05
        if is_roster:
            self.restart_store_soon()
        freezes = freezes and not node.is_protected
        if freezes:
            self.tell_fate(node, "freezes in the middle of writing")
            node.freeze(self.rng.choice((16 * S, 20 * S, 60 * S)))
        return freezes

    def draw_work(self, node: SimNode) -> tuple[int, Callable[[], None]]:
        """Plan the work of a node's workers in a round."""
        bad = self.now_ns < BAD_TIMES_NS
        if bad and self.rng.random() < self.failing / len(self.nodes):
            return self.rng.randrange(20 * S), node.fail

        def succeed() -> None:
            assert node.round
            self.checks.succeeded.setdefault(node.round.number, set()).add(node.node.id)
            node.succeed()

        # somewhere between: some nodes are earlier than others
        return self.rng.randrange(10 * S, 40 * S), succeed

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes if node.is_alive and node.outcome is None]

    def victim(self) -> SimNode | None:
        living = [node for node in self.living() if not node.is_protected]
        leaders = [node for node in living if node.participant.is_leader]
        if leaders and self.rng.random() < 0.5:
            return self.rng.choice(leaders)
        return self.rng.choice(living) if living else None

    # Fates

    def kill(self) -> None:
        self.lose_one("dies", is_noticed=True)

    def power_off(self) -> None:
        self.lose_one("is without power", is_noticed=False)

    def lose_one(self, what: str, is_noticed: bool) -> None:
        if node := self.victim():
            self.tell_fate(node, what)
            node.die(is_noticed)
            for other in self.nodes:
                if other.round and node.round and other.is_alive and self.rng.random() < 0.3:
                    other.later(self.rng.randrange(3 * S), lambda other=other: other.fail(blames_peer=True))  # type: ignore[misc]
            if self.rng.random() < 0.6:
                start = int(node.name.split(".")[1]) + 1
                self.at(self.now_ns + self.rng.randrange(20 * S), lambda: self.add(node.host, start))

    def freeze(self) -> None:
        if node := self.victim():
            self.tell_fate(node, "freezes")
            node.freeze(self.rng.choice((S, 10 * S, 20 * S, 60 * S)))

    def cut(self) -> None:
        if node := self.victim():
            self.tell_fate(node, "loses its connection")
            node.lose_connection(comes_back=True)

    def lose_store(self) -> None:
        """End the store, sometimes with a node. All others find another one, which is empty."""
        knowing = [node for node in self.living() if node.knows_all() and not node.is_frozen]
        states = [node.participant.state for node in self.nodes]
        if not knowing or any(state and not state.is_open for state in states):
            return  # it would be another job
        keeper = max(knowing, key=lambda node: node.version())
        if self.rounds_known(keeper) < max(self.checks.rounds, default=-1):
            return  # only frozen nodes know the last round: nothing can keep another one from its number
        keeper.is_protected = True
        if self.rng.random() < 0.5:
            self.kill()
        self.counts["the store is lost"] += 1
        self.note("the store", "is lost")
        self.checks.leader_harmed_ns = self.now_ns
        self.checks.lost_store()
        self.store.forget()
        for node in self.nodes:
            if node.is_alive:
                node.lose_store()

    def rounds_known(self, node: SimNode) -> int:
        """Return the number of the last round that this node knows to have begun; -1: of none."""
        state = node.participant.state
        return state.roster.number if state and state.roster else -1

    def restart_store(self) -> None:
        """Restart the store with all keys except the held ones. No node dies of that."""
        self.counts["the store restarts"] += 1
        self.note("the store", "restarts")
        self.checks.leader_harmed_ns = self.now_ns
        held = self.store.restart()
        self.restarted_ns = self.now_ns
        for node in self.nodes:
            node.is_heard = False
            if node.node.id in held:
                node.joined_ns = self.now_ns
                node.hold_again(held[node.node.id], self.rng.randrange(5 * S))
                node.watch_again(self.rng.choice((0, self.rng.randrange(S), self.rng.randrange(5 * S))))
        if self.now_ns < BAD_TIMES_NS and self.rng.random() < 0.3:
            self.at(self.now_ns + self.rng.randrange(8 * S), self.restart_store)

    def restart_store_soon(self) -> None:
        """Called when a node joins or a round begins."""
        if self.now_ns < BAD_TIMES_NS and self.rng.random() < 0.02 / self.crowd:
            self.at(self.now_ns + self.rng.randrange(20 * self.typical_ns), self.restart_store)

    def leave(self) -> None:
        if node := self.victim():
            self.tell_fate(node, "leaves")
            node.is_harmed = node.is_leaving = True
            node.perform(node.participant.leave("enough", 2 * S))
            node.later(self.rng.randrange(2 * S), node.close)

    def end_job(self) -> None:
        if node := self.victim():
            self.interrupt(node)

    def interrupt(self, node: SimNode) -> None:
        """End the job at a node; a frozen one receives the interrupt when it thaws, before most other events."""

        def end() -> None:
            if node.outcome is None:
                self.tell_fate(node, "ends the job")
                node.end_job()
                node.later(self.rng.randrange(2 * S), node.close)

        node.later(0, end)

    def freeze_and_end_job(self) -> None:
        if node := self.victim():
            self.tell_fate(node, "freezes")
            node.freeze(self.rng.choice((10 * S, 20 * S, 60 * S)))
            self.interrupt(node)

    def end_job_without_leader(self) -> None:
        """End the job at a node before the others know that the leader is lost."""
        for node in self.living():
            if node.participant.is_leader and not node.is_protected:
                self.tell_fate(node, "is without power")
                node.die(is_noticed=False)
        self.at(self.now_ns + self.rng.randrange(3 * S), self.end_job)

    def add(self, host: int, start: int) -> None:
        node = self.node_type(self, host, start)
        self.nodes.append(node)
        self.counts["late nodes"] += 1
        self.come(node)

    def come(self, node: SimNode) -> None:
        """A node that starts after the loss of the store finds no other store until the loss is known."""
        if any(each.is_protected for each in self.living()):
            self.at(self.now_ns + S // 10, lambda: self.come(node))
            return
        self.note(node.name, "comes")
        self.restart_store_soon()
        node.start()

    def tell_fate(self, node: SimNode, what: str) -> None:
        role = "the leader" if node.participant.is_leader else "a node"
        if node.participant.is_leader:
            self.checks.leader_harmed_ns = self.now_ns
        self.counts[f"{role} {what}"] += 1
        self.note(node.name, what)

    # From the beginning to the end

    def run(self) -> Counter[str]:
        """Run to the end; return how often each event happened. Raises Broken, or the error of a machine."""
        while self.agenda and not self.is_over():
            self.now_ns, _, do = heapq.heappop(self.agenda)
            if self.now_ns >= BOUND_NS:
                raise Broken(f"it goes on for ever: {self.waiting()}")
            do()
        for node in self.nodes:
            if node.is_alive or node.outcome:
                self.counts[f"nodes: {self.checks.outcome(node)}"] += 1
        if STATE in self.store.values:
            state = decode_state(self.store.values[STATE])
            leader = self.by_id(state.leader)
            self.checks.store(state, self.store.values, leader.led_to_the_end)
        self.counts["rounds"] += len(self.checks.rounds)
        return self.counts

    def is_over(self) -> bool:
        if self.now_ns <= BAD_TIMES_NS:
            return False
        return not any(node.is_alive and node.outcome is None for node in self.nodes)

    def waiting(self) -> list[str]:
        return [node.name for node in self.nodes if node.is_alive and node.outcome is None]


def simulate(seed: int, nodes: int, kind: type[Simulation] = Simulation) -> Counter[str]:
    """Run one simulation; return how often each event happened. Raises Broken with the command that replays it."""
    return command.run(kind(seed, nodes), f"{kind.module} --seed {seed} --nodes {nodes}")


def draw_nodes(seed: int) -> int:
    rng = random.Random(seed)
    return rng.choice((1, 2, 2, 3, 3, 4, rng.randint(5, 12), rng.randint(5, 30)))


def main(argv: Sequence[str] | None = None, kind: type[Simulation] = Simulation) -> int:
    about = "Simulate rendezvous with the real machines."
    return command.main(argv, about, "nodes", lambda seed, nodes: simulate(seed, nodes, kind), draw_nodes)


if __name__ == "__main__":
    sys.exit(main())
