"""The vocabulary of the rendezvous: nodes, rounds, and the events that an agent receives. Pure.

A *node* is one agent with its workers. A *round* is a period of fixed membership: its nodes start their workers
together, and it ends for all of them when a node is lost, a worker fails, or another node can join. Rounds are numbered
from 0.
"""

from __future__ import annotations

from ronde.light_dataclasses import dataclass

__all__ = [
    "AllSucceeded",
    "Budget",
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
    "WorkerFailed",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A node's description of itself, sent when it joins.

    `id`: unique in the job, and new with every start of an agent. `host`: its name for messages. `address`: the numeric
    address at which other nodes reach it. `slots`: its number of workers. `store`: where its agent would serve the
    store of a round in which it has group rank 0. `master_port`: a free port of the node, for a server of the user's
    program on rank 0. `wish`: the group rank that it asks for, -1 for any. `meeting`, which the rendezvous fills in:
    where the agent listens, so that other nodes can find out whether it has ended, and can meet again there if they
    lose the store; empty if it does not listen. `host_id`: nodes with the same one count as one host; empty: each node
    counts as one.
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


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a job may go on after the end of a round; the same for all nodes.

    `restarts`: after a worker has failed. `changes`: after nodes were lost or have joined; -1: without limit.
    """

    restarts: int = 0
    changes: int = -1


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a worker in a round. `message`: one line; `details`: a traceback, or its last output.

    `blames_peer`: the worker failed because it lost a worker of another node. Then the cause may be elsewhere: the
    first failure that blames no peer, or the loss of a node, counts as the round's failure if it shows soon.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int  # minus the signal, if one killed it
    message: str
    details: str = ""
    blames_peer: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A round: its `nodes` by group rank, and the `group_rank` of this node.

    `restarts`: how many rounds have ended so far because a worker failed; `changes`: because nodes were lost or have
    joined. Both are the same on all nodes. `job`: identifies this start of the job, in all of its rounds.
    """

    number: int
    nodes: tuple[Node, ...]
    group_rank: int
    restarts: int = 0
    changes: int = 0
    job: str = ""


# Causes of a round's end


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of a node failed."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class NodesLost:
    """These nodes are gone or silent, or have left; `reason` names their hosts and how the loss was noticed.

    If many are lost, `nodes` has the first of them, and `ranges` the group ranks of all, in pairs of first and last.
    """

    nodes: tuple[Node, ...]
    reason: str
    ranges: tuple[int, ...] = ()

    def ids(self, roster: tuple[Node, ...]) -> set[str]:
        """Return the ids of all lost nodes; `roster`: the nodes of the round that has ended."""
        pairs = zip(self.ranges[::2], self.ranges[1::2])
        listed = {node.id for first, last in pairs for node in roster[first : last + 1]}
        return listed | {node.id for node in self.nodes}


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """Late nodes wait, and there is room for them."""

    count: int


# Events for the agent


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Start the workers."""

    round: Round


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Stop the workers and join again."""

    number: int
    cause: WorkerFailed | NodesLost | NodesWaiting


@dataclass(frozen=True, slots=True)
class AllSucceeded:
    """The workers of every node of the round have succeeded."""

    number: int


@dataclass(frozen=True, slots=True)
class JobClosed:
    """No more rounds follow: stop the workers, if there are any. `failure`: the worker's failure that closed the job.

    `completed`: the workers of all nodes of the last round have succeeded, and this node was not part of it.
    """

    reason: str
    failure: Failure | None = None
    completed: bool = False


@dataclass(frozen=True, slots=True)
class Ejected:
    """The others took this node for lost and have gone on: stop the workers, and join again to come back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the user: which nodes the rendezvous waits for, or that the store is silent."""

    text: str


@dataclass(frozen=True, slots=True)
class RendezvousBroken:
    """The node cannot take part any more: the store is lost, or no round has begun in time."""

    reason: str


RendezvousEvent = RoundBegan | RoundEnded | AllSucceeded | JobClosed | Ejected | Notice | RendezvousBroken
