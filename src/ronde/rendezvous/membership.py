"""The vocabulary of the rendezvous: nodes, rounds, their parameters, and the events that an agent receives. Pure.

A *node* is one agent with its workers. A *round* is a period of fixed membership: its nodes start their workers
together, and it ends for all of them when a node is lost, a worker fails, or another node can join. Rounds are numbered
from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "HOW_TO_RESUME",
    "AllSucceeded",
    "Budget",
    "ChangeRequested",
    "Ejected",
    "Failure",
    "JobClosed",
    "Node",
    "NodesLost",
    "NodesWaiting",
    "Notice",
    "RendezvousBroken",
    "RendezvousEvent",
    "Round",
    "RoundBegan",
    "RoundEnded",
    "Rules",
    "WorkerFailed",
    "node_names",
]

SECOND = 10**9

# The end of messages of jobs that end because too few are left.
HOW_TO_RESUME = (
    "To resume, start the job again with the same command, in a world of any size: the training goes on from its "
    "newest snapshot (state.keep_snapshots) or checkpoint, and without one from the beginning"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node's description of itself, sent when it joins.

    Attributes:
        id: A text that is unique in the job, and new with every start of an agent.
        host: The name of its host, for messages.
        address: The numeric address at which other nodes reach it.
        slots: Its number of workers.
        store: Where its agent would serve the store of a round in which it has group rank 0.
        master_port: A free port of the node, for a server of the user's program on rank 0.
        role: The role of its workers, as of torchrun ("default").
        wish: The group rank that it asks for; -1 (default) for any.
        meeting: Where the agent listens, so that other nodes can find out whether it has ended, and can meet again
            there if they lose the store; empty if it does not listen. The rendezvous fills it in.
        host_id: Nodes with the same one count as one host; empty (default): each node counts as one.
        has_workers: Workers of its last round run on, and will take part in the next one (false).
    """

    id: str
    host: str
    address: str
    slots: int
    store: str
    master_port: int
    role: str = "default"
    wish: int = -1
    meeting: str = ""
    host_id: str = ""
    has_workers: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a job may go on after the end of a round; the same for all nodes.

    Attributes:
        restarts: How often after a worker has failed (0).
        changes: How often after nodes were lost or have joined; -1 (default): without limit.
    """

    restarts: int = 0
    changes: int = -1


@dataclass(frozen=True)
class Rules:
    """The parameters by which a node takes part.

    Attributes:
        min_nodes: The least number of nodes of a round (1).
        max_nodes: The greatest number of nodes of a round (1).
        spares: How many nodes may wait for a place without limit (0).
        join_timeout_ns: How long other nodes wait for a place, in nanoseconds (600 s).
        first_join_timeout_ns: The same before their first round (0: `join_timeout_ns`).
        last_call_ns: How long a round with the minimum of nodes waits for more, in nanoseconds (30 s).
        heartbeat_ns: The interval between heartbeats, in nanoseconds (5 s).
        missing_heartbeats: After how many missing heartbeats a node is lost (3).
        places_are_given: Every node wishes for its group rank, and of two with the same wish one is refused (false).
        min_slots: The least number of slots that the nodes of a round have together (0).
        rehost: Nodes that lose the store may meet at the store of another node (false).
        gives_way: When no restart is left, a failed worker takes its node out of the job and does not end the job
            (false).
        longest_end_ns: How long the workers of a node may take to end, in nanoseconds (0).
    """

    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    join_timeout_ns: int = 600 * SECOND
    first_join_timeout_ns: int = 0
    last_call_ns: int = 30 * SECOND
    heartbeat_ns: int = 5 * SECOND
    missing_heartbeats: int = 3
    places_are_given: bool = False
    min_slots: int = 0
    rehost: bool = False
    gives_way: bool = False
    longest_end_ns: int = 0

    def patience_ns(self, is_first: bool) -> int:
        """Return how long a node waits for a round, in nanoseconds. Raises nothing.

        Args:
            is_first: Whether it has been in no round.
        """
        return self.first_join_timeout_ns if is_first and self.first_join_timeout_ns else self.join_timeout_ns

    @property
    def silence_ns(self) -> int:
        """After how much silence a node, or the store, counts as lost, in nanoseconds."""
        return self.missing_heartbeats * self.heartbeat_ns


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a worker in a round.

    Attributes:
        rank: The rank of the worker.
        local_rank: Its local rank.
        host: The name of its host.
        pid: The id of its process.
        exit_code: Its exit code, or the negative number of the signal that killed it.
        message: What happened, in one line.
        details: A traceback, or its last output ("": none).
        blames_peer: Whether the worker failed because it lost a worker of another node (false). Then the cause may be
            elsewhere: the first failure that blames no peer, or the loss of a node, counts as the round's failure if it
            shows soon.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int
    message: str
    details: str = ""
    blames_peer: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A round, from the view of one of its nodes.

    Attributes:
        number: The number of the round, from 0.
        nodes: Its nodes, by group rank.
        group_rank: The group rank of this node.
        restarts: How many rounds have ended so far because a worker failed, the same on all nodes.
        changes: How many have ended because nodes were lost or have joined, the same on all nodes.
        job: Identifies this start of the job, in all of its rounds.
        previous: The number of the round that has begun before this one; -1: none.
    """

    number: int
    nodes: tuple[Node, ...]
    group_rank: int
    restarts: int = 0
    changes: int = 0
    job: str = ""
    previous: int = -1


def node_names(some: Iterable[Node], nodes: Sequence[Node]) -> list[str]:
    """Return the names of some nodes of a round, for messages: their hosts, with numbers for agents of one host.

    Raises nothing.

    Args:
        some: The nodes to name.
        nodes: Those of the round, in the order of their group ranks.
    """
    numbers = {node.id: number for number, node in enumerate(nodes)}
    counts = Counter(node.host for node in nodes)
    return [
        f"{node.host} (node {numbers[node.id]})"
        if counts[node.host] > 1 and node.id in numbers
        else node.host
        for node in some
    ]


# Causes of a round's end


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of a node failed.

    Attributes:
        failure: Its failure.
    """

    failure: Failure


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Nodes are gone or silent, or have left.

    Attributes:
        nodes: The lost nodes; if many are lost, the first of them.
        reason: The names of their hosts, and how the loss was noticed.
        ranges: If many are lost, the group ranks of all, in pairs of first and last.
    """

    nodes: tuple[Node, ...]
    reason: str
    ranges: tuple[int, ...] = ()

    def ids(self, roster: tuple[Node, ...]) -> set[str]:
        """Return the ids of all lost nodes. Raises nothing.

        Args:
            roster: The nodes of the round that has ended, by group rank.
        """
        pairs = zip(self.ranges[::2], self.ranges[1::2])
        listed = {node.id for first, last in pairs for node in roster[first : last + 1]}
        return listed | {node.id for node in self.nodes}


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """Late nodes wait, and there is room for them.

    Attributes:
        count: The number of these nodes.
    """

    count: int


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """A node has asked for another round: it has more workers to give, or its workers have left their world.

    Attributes:
        reason: Why, in one line.
    """

    reason: str


# Events for the agent


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Start the workers.

    Attributes:
        round: The round that has begun.
    """

    round: Round


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Stop the workers and join again.

    Attributes:
        number: The number of the round that has ended.
        cause: Why.
    """

    number: int
    cause: WorkerFailed | NodesLost | NodesWaiting | ChangeRequested


@dataclass(frozen=True, slots=True)
class AllSucceeded:
    """The workers of every node of the round have succeeded.

    Attributes:
        number: The number of the round.
    """

    number: int


@dataclass(frozen=True, slots=True)
class JobClosed:
    """No more rounds follow: stop the workers, if there are any.

    Attributes:
        reason: Why, in one line.
        failure: The worker's failure that closed the job; None if none did.
        completed: Whether the workers of all nodes of the last round have succeeded, and this node was not part of it.
        was_full: Whether this node, which was no spare, has waited for a place in the job while it was full.
    """

    reason: str
    failure: Failure | None = None
    completed: bool = False
    was_full: bool = False


@dataclass(frozen=True, slots=True)
class Ejected:
    """The others took this node for lost and have gone on: stop the workers, and join again to come back.

    Attributes:
        reason: Why they did, in one line.
        is_unsure: They may not have: the lease of this node has run out. Workers that leave their world within half a
            heartbeat may wait for the next round, and take part if that follows the one which they have left (false).
    """

    reason: str
    is_unsure: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the user: which nodes the rendezvous waits for, or that the store is silent.

    Attributes:
        text: The message.
    """

    text: str


@dataclass(frozen=True, slots=True)
class RendezvousBroken:
    """The node cannot take part any more: the store is lost, or no round has begun in time.

    Attributes:
        reason: Why, in one line.
    """

    reason: str


RendezvousEvent = RoundBegan | RoundEnded | AllSucceeded | JobClosed | Ejected | Notice | RendezvousBroken
