"""The data that the nodes of a job share in the store: the state, rosters, messages and heartbeats. Pure.

Keys, all under the job's prefix

    state               the `JobState`, changed by compare-and-set only
    roster/T.N/P        part P of the nodes of round N, as decided in term T; written before the state names it
    inbox/T/messages    a queue: the messages to the leader of term T
    alive/ID            held by node ID while it lives
    sentinel/ID         held by node ID, and set by it to another value: see `rendezvous/liveness`
    heartbeat/ID        the `Heartbeat` of node ID, written every heartbeat; stays until a round begins without the node
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ronde.rendezvous.membership import Budget, Failure, Node, NodesLost, NodesWaiting, WorkerFailed
from ronde.rendezvous.rules import Rules

__all__ = [
    "ALIVE",
    "PART_NODES",
    "STATE",
    "Heartbeat",
    "Cause",
    "FailureReport",
    "JoinRequest",
    "LeaveNotice",
    "Message",
    "JobPhase",
    "Refused",
    "RosterKey",
    "JobState",
    "SuccessReport",
    "JobTerms",
    "alive_key",
    "heartbeat_key",
    "inbox_queue",
]

STATE = "state"
ALIVE = b"alive"  # the value of a held key; only its presence matters
PART_NODES = 2000  # of a roster, in one key: a store's value has at most 1 MiB
SECOND = 10**9

Cause = WorkerFailed | NodesLost | NodesWaiting


def alive_key(node: str) -> str:
    """Return the key that the node holds while it lives."""
    return f"alive/{node}"


def heartbeat_key(node: str) -> str:
    """Return the key of the node's heartbeats."""
    return f"heartbeat/{node}"


def inbox_queue(term: int) -> str:
    """Return the queue of the term's leader. A deposed leader takes no messages from its successor's."""
    return f"inbox/{term}/messages"


@dataclass(frozen=True, slots=True)
class JobTerms:
    """The parameters that all nodes of a job share, because any of them may lead; fields have the users' names."""

    min_nodes: int
    max_nodes: int
    max_restarts: int
    max_changes: int
    heartbeat_ns: int
    missing_heartbeats: int
    places_are_given: bool
    rehost: bool

    @classmethod
    def of(cls, rules: Rules, budget: Budget) -> JobTerms:
        """Return the terms of a node with these rules and this budget."""
        return cls(
            min_nodes=rules.min_nodes,
            max_nodes=rules.max_nodes,
            max_restarts=budget.restarts,
            max_changes=budget.changes,
            heartbeat_ns=rules.heartbeat_ns,
            missing_heartbeats=rules.missing_heartbeats,
            places_are_given=rules.places_are_given,
            rehost=rules.rehost,
        )

    def difference(self, jobs: JobTerms) -> str:
        """Return a list of the differences from the job's terms, or "" if there are none."""
        pairs = ((name, getattr(self, name), getattr(jobs, name)) for name in self.__match_args__)
        return ", ".join(
            f"{name}={ours} where the job has {theirs}" for name, ours, theirs in pairs if ours != theirs
        )


class JobPhase(StrEnum):
    """The phase of a job."""

    FORMING = "forming"  # round `number` waits for its nodes
    RUNNING = "running"  # the nodes of the roster work
    COMPLETED = "completed"  # all of them have succeeded
    CLOSED = "closed"  # no more rounds follow


@dataclass(frozen=True, slots=True)
class RosterKey:
    """Where the roster of a round is. Two terms never write to the same keys."""

    term: int
    number: int
    parts: int

    @property
    def prefix(self) -> str:
        """The prefix of the keys."""
        return f"roster/{self.term}.{self.number}/"

    @property
    def keys(self) -> list[str]:
        """The keys of the parts, in order."""
        return [f"{self.prefix}{part}" for part in range(self.parts)]


@dataclass(frozen=True, slots=True)
class Refused:
    """A node that cannot take part, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that the nodes have agreed on. The leader of the term writes it; a node that ends the job does, too.

    `leader`: the id of the node that leads. `term`: grows with every leader. `version`: differs in all written states.
    `number`: of the round that forms or runs. `roster`: where the nodes of the last round that began are listed.
    `restarts`, `changes`: spent so far, see `Budget`. `cause`: why round `number - 1` ended. `largest`: the largest
    number of nodes in a round. `joined`: how many nodes have joined the round. `waiting`: how many wait beside it.
    `spares`: the ids of nodes that wait without limit. `refused`: the last refused nodes. `failure`: of the closed job.
    `has_moved`: the last round began at another store, where other nodes may still be (`quorum`). `missing`: how many
    more nodes of the last round must be present before the next one can begin. `job`: a text that identifies this start
    of the job. `alive`: how many nodes of the roster have not been lost, also after they had succeeded. `joined`,
    `waiting`, `missing` and `alive` only inform users, and may lag behind.
    """

    terms: JobTerms
    leader: str
    term: int = 1
    version: int = 0
    phase: JobPhase = JobPhase.FORMING
    number: int = 0
    roster: RosterKey | None = None
    restarts: int = 0
    changes: int = 0
    cause: WorkerFailed | NodesLost | NodesWaiting | None = None
    largest: int = 0
    joined: int = 0
    waiting: int = 0
    spares: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    reason: str = ""  # why the job is closed
    failure: Failure | None = None
    has_moved: bool = False
    missing: int = 0
    job: str = ""
    alive: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the job goes on: it is neither completed nor closed."""
        return self.phase is JobPhase.FORMING or self.phase is JobPhase.RUNNING

    def is_newer(self, other: JobState, elsewhere: bool) -> bool:
        """Return whether this state counts rather than the other; `elsewhere`: the other is from another store."""
        if elsewhere and self._begun != other._begun:
            return self._begun > other._begun
        if elsewhere and self.is_open != other.is_open:
            return other.is_open  # an earlier arrival at this store has ended the job
        if self.is_open and other.is_open and self.number != other.number:
            # A node that was frozen may have written an old round with high versions, to a store that lost its data.
            return self.number > other.number
        return self.version > other.version

    @property
    def _begun(self) -> int:
        return self.roster.number if self.roster else -1

    def restored(self, leader: str, found: JobState | None, elsewhere: bool = False) -> JobState:
        """Return the state to write into a store that has lost this one; `found`: the older state there, if any.

        `elsewhere`: the store is another one than that of this state.
        """
        return replace(
            self,
            leader=leader,
            term=max(self.term, found.term if found else 0) + 1,
            version=max(self.version, found.version if found else 0) + 1,
            number=self.number + (self.phase == JobPhase.FORMING),  # that round may have begun meanwhile
            has_moved=self.has_moved or elsewhere,
        )


# Messages to the leader. `seq` grows with every message of a node, so the leader recognizes repeated ones.


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The node asks for a place in a round later than `after`; it has no workers.

    `promised`: at another store it has asked for a place in a round after this one, without learning the outcome.
    """

    seq: int
    node: Node
    after: int
    promised: int = -1


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A worker of the node failed in this round."""

    seq: int
    id: str
    round: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class SuccessReport:
    """All workers of the node have succeeded in this round."""

    seq: int
    id: str
    round: int


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """The node leaves on purpose. Its workers end within `ends_within_ns`; 0: it has none."""

    seq: int
    id: str
    host: str
    reason: str
    ends_within_ns: int = 0


Message = JoinRequest | FailureReport | SuccessReport | LeaveNotice


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life. `count`: grows; `succeeded`: the latest round in which all workers of the node succeeded.

    `awaits_exit`: a worker of the node has left the other ranks, and its exit code is not known yet.
    The heartbeat outlives the node, so a node that dies after it has succeeded is no loss.
    """

    count: int
    succeeded: int
    awaits_exit: bool = False
