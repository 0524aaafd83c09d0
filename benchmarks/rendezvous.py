"""What a rendezvous costs the store and the leader, and how long it takes, up to 10,000 nodes: see README.md.

    python benchmarks/rendezvous.py --csv rendezvous.csv --plot docs/rendezvous.png

No process is started. The machines of all nodes run here, in the simulator of tests/sim, without anything that goes
wrong. What every message costs follows from the `Network` below; the leader's processor time is measured.
"""

from __future__ import annotations

import argparse
import heapq
import pathlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tables import write_csv
from tests.sim.rendezvous_node import SimNode
from tests.sim.rendezvous_store import SimStore

from ronde.rendezvous.effects import Event, Set
from ronde.rendezvous.membership import Budget, RendezvousEvent, RoundBegan, RoundEnded, Rules

if TYPE_CHECKING:
    from tests.sim.rendezvous import Simulation

S = 10**9


@dataclass(frozen=True)
class Network:
    """The store handles a request or an answer in `handling_us`, one after the other; it is on its way for `latency_us`
    and takes the store's connection for its bytes. 10 Gbit/s Ethernet, and a store in Python."""

    latency_us: float = 25.0
    handling_us: float = 20.0
    bytes_per_us: float = 1250.0


@dataclass(frozen=True)
class Row:
    """Of one event: requests to the store and bytes, the leader's processor time, and the time until all nodes know."""

    event: str
    nodes: int
    messages: int
    bytes: int
    leader_ms: float
    time_ms: float


class TimedNode(SimNode):
    """A node that does nothing but meet; its processor time is taken."""

    cpu_ns = 0
    begun = -1

    def step(self, event: Event) -> None:
        began = time.process_time_ns()
        effects = self.participant.step(self.now_ns(), event)
        self.cpu_ns += time.process_time_ns() - began
        self.perform(effects)

    def told(self, event: RendezvousEvent) -> None:
        if isinstance(event, RoundBegan):
            self.begun = event.round.number
            self.sim_world.begun += 1
        elif isinstance(event, RoundEnded):
            self.later(0, self.start)

    def has_written(self, raw: bytes) -> None:
        pass

    @property
    def sim_world(self) -> World:
        return cast(World, self.sim)


class World:
    """What a `SimNode` needs around it, where nothing goes wrong."""

    def __init__(self, nodes: int) -> None:
        self.rng = random.Random(nodes)
        self.network = Network()
        self.crowd = 1.0
        self.now_ns = 0
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.planned = 0
        self.store = SimStore()
        self.busy_ns = 0.0  # until when the store has something to do
        self.billed = 0  # bytes that have taken their time
        self.begun = 0  # nodes that know of the round
        self.counts: Counter[str] = Counter()
        self.rules = Rules(min_nodes=nodes - 1, max_nodes=nodes, heartbeat_ns=3600 * S)
        self.budget = Budget()
        self.nodes = [self.node(host) for host in range(nodes)]

    def node(self, host: int) -> TimedNode:
        return TimedNode(cast("Simulation", self), host, 0)

    def at(self, at_ns: int, do: Callable[[], None]) -> None:
        self.planned += 1
        heapq.heappush(self.agenda, (at_ns, self.planned, do))

    def latency_ns(self) -> int:
        """Of a request or an answer: those before it at the store, its own time there, and the way."""
        new, self.billed = self.store.bytes - self.billed, self.store.bytes
        took_ns = 1000 * (self.network.handling_us + new / self.network.bytes_per_us)
        self.busy_ns = max(self.busy_ns, self.now_ns) + took_ns
        return int(self.busy_ns - self.now_ns + 1000 * self.network.latency_us)

    def hiccups(self, crowd: float = 1.0) -> bool:
        return False

    def freezes_before(self, node: SimNode, effect: Set) -> bool:
        return False

    def note(self, *what: object) -> None:
        pass

    def measure(self, event: str, nodes: int, happen: Callable[[], None]) -> Row:
        """Let it happen, and go on until so many nodes have begun a round."""
        began_ns, messages, nbytes = self.now_ns, self.store.messages.total(), self.store.bytes
        cpu_ns = {node.name: node.cpu_ns for node in self.nodes}
        self.begun = 0
        happen()
        while self.begun < nodes:
            self.now_ns, _, do = heapq.heappop(self.agenda)
            do()
        leader = next(node for node in self.nodes if node.is_alive and node.participant.is_leader)
        row = Row(
            event,
            nodes,
            self.store.messages.total() - messages,
            self.store.bytes - nbytes,
            (leader.cpu_ns - cpu_ns.get(leader.name, 0)) / 1e6,
            (self.now_ns - began_ns) / 1e6,
        )
        self.settle()
        return row

    def settle(self) -> None:
        """What is still on its way arrives."""
        until_ns = self.now_ns + 10 * S
        while self.agenda[0][0] < until_ns:
            self.now_ns, _, do = heapq.heappop(self.agenda)
            do()

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def lose_one(self) -> None:
        follower = next(node for node in self.nodes if not node.participant.is_leader)
        follower.die(is_noticed=True)

    def add_one(self) -> None:
        self.nodes.append(self.node(len(self.nodes)))
        self.nodes[-1].start()


EVENTS = ("first round", "a node is lost", "a node comes")


def measure(sizes: Sequence[int]) -> list[Row]:
    rows = []
    for nodes in sizes:
        world = World(nodes)
        rows.append(world.measure(EVENTS[0], nodes, world.start))
        rows.append(world.measure(EVENTS[1], nodes - 1, world.lose_one))
        rows.append(world.measure(EVENTS[2], nodes, world.add_one))
        for row in rows[-len(EVENTS) :]:
            print(
                f"{row.event:15} {row.nodes:6} nodes {row.messages:8} messages ({row.messages / row.nodes:4.1f} each) "
                f"{row.bytes:12} bytes  {row.leader_ms:9.2f} ms of the leader  {row.time_ms:9.2f} ms",
                flush=True,
            )
    return rows


def plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Write a picture: messages, bytes, the leader's time and all time over nodes, of each event."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.8), layout="constrained", sharex=True)
    panels: dict[str, Callable[[Row], float]] = {
        "requests to the store": lambda row: row.messages,
        "bytes at the store": lambda row: row.bytes,
        "ms of the leader's processor": lambda row: row.leader_ms,
        "ms until all nodes know the round": lambda row: row.time_ms,
    }
    colors = dict(zip(EVENTS, ("#1f5fa8", "#b03a2e", "#7f8c8d")))
    for axis, (what, value) in zip(axes, panels.items()):
        for event, color in colors.items():
            points = [(row.nodes, value(row)) for row in rows if row.event == event]
            axis.loglog(*zip(*points), color=color, marker="o", ms=4, lw=2, label=event)
        axis.set_title(what, fontsize=10, loc="left")
        axis.set_xlabel("nodes")
        axis.xaxis.set_major_formatter(lambda nodes, _: f"{nodes:,.0f}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a rendezvous costs, by number of nodes.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32, 100, 320, 1000, 3200, 10_000])
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = measure(arguments.nodes)
    if arguments.csv:
        write_csv(arguments.csv, Row, rows)
    if arguments.plot:
        plot(arguments.plot, rows)


if __name__ == "__main__":
    main()
