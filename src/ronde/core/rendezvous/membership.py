"""The words of rendezvous: what a node says about itself, what a round is, and what nodes are told about it. Pure.

A *node* is one agent with its workers. A *round* is one gathering of nodes that start their workers together; it ends
for all of them when a node is lost, a worker fails, or somebody else wants to take part. Rounds are numbered from 0.
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
    """What a node says about itself when it joins.

    `id` is unique in the job and new with every start of an agent; `host` its name for messages; `address` the numeric
    address by which other nodes reach it; `slots` its number of workers; `store` where its agent serves a store for the
    workers of a round that it leads (group rank 0); `master_port` a port that was free there, for whatever rank 0 of
    the user's program wants to serve; `wish` the group rank it asks for, -1 for any. The rendezvous fills in `meeting`:
    where this node's agent listens, so that others can find out whether it has ended, and may serve a store for all
    nodes to meet again if theirs is lost; empty if nowhere.
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


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a job may go on after a failure; all nodes must say the same.

    `restarts`: after a worker has failed; `changes`: after the membership has changed or a node was lost, -1 for ever.
    """

    restarts: int = 0
    changes: int = -1


@dataclass(frozen=True, slots=True)
class Failure:
    """A round's first failure, as its node tells it: `message` is one line, `details` a traceback or last words.

    `blames_peer`: the worker failed because it lost a worker of another node. Then the cause may be elsewhere, and the
    round's failure is the first one that does not say so, or the loss of a node, if either shows soon.
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
    """One gathering: its nodes by group rank, and which of them is this one.

    `restarts` counts the rounds that a failure of a worker has ended so far, and `changes` those that a lost or new
    node has; both are the same on all nodes. `job` is the same in all rounds of a job, and another for each start.
    """

    number: int
    nodes: tuple[Node, ...]
    group_rank: int
    restarts: int = 0
    changes: int = 0
    job: str = ""


# Why a round has ended.


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of some node failed."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class NodesLost:
    """These nodes are gone or silent, or left; `reason` says which, and how that was noticed.

    Of many nodes only some are in `nodes`; `ranges` then has the group ranks of all, in pairs of first and last.
    """

    nodes: tuple[Node, ...]
    reason: str
    ranges: tuple[int, ...] = ()

    def ids(self, roster: tuple[Node, ...]) -> set[str]:
        """Return the ids of all of them; `roster` has the nodes of the round that has ended."""
        pairs = zip(self.ranges[::2], self.ranges[1::2])
        listed = {node.id for first, last in pairs for node in roster[first : last + 1]}
        return listed | {node.id for node in self.nodes}


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """There is room for nodes that came late."""

    count: int


# What a node is told.


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
    """Every node of the round has said that its workers succeeded."""

    number: int


@dataclass(frozen=True, slots=True)
class JobClosed:
    """There will be no more rounds: stop the workers, if there are any. `failure` is why, if a worker's failure is.

    `completed`: the workers of all nodes of the last round have succeeded, and this node was not needed.
    """

    reason: str
    failure: Failure | None = None
    completed: bool = False


@dataclass(frozen=True, slots=True)
class Ejected:
    """The others took this node for dead and have gone on: stop the workers, and join again to come back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something for the user's eyes: who is waited for, who is silent."""

    text: str


@dataclass(frozen=True, slots=True)
class RendezvousBroken:
    """The node cannot take part any more: the store is lost, or it did not begin in time."""

    reason: str


RendezvousEvent = RoundBegan | RoundEnded | AllSucceeded | JobClosed | Ejected | Notice | RendezvousBroken
