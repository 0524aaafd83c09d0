"""What the nodes of a job write into the store: the one state, the rosters of rounds, and messages to the leader. Pure.

Keys, all under the job's prefix

    state               the `JobState`, changed by compare-and-set only
    roster/T.N/P        part P of the nodes of round N, as decided in term T; written before the state names it
    inbox/T/messages    a queue: what nodes say to the leader of term T
    alive/ID            held by node ID for as long as it lives
    sentinel/ID         held by node ID, and set by it to another value: see `core/rendezvous/liveness`
    heartbeat/ID        the `Heartbeat` of node ID, written every heartbeat; stays until a round begins without the node
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ronde.core.rendezvous.membership import Budget, Failure, Node, NodesLost, NodesWaiting, WorkerFailed
from ronde.core.rendezvous.rules import Rules

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
ALIVE = b"alive"  # the value of a held key: only whether it is there matters
PART_NODES = 2000  # of a roster in one key: a store's value has at most 1 MiB
SECOND = 10**9

Cause = WorkerFailed | NodesLost | NodesWaiting


def alive_key(node: str) -> str:
    """Return the key that the node holds."""
    return f"alive/{node}"


def heartbeat_key(node: str) -> str:
    """Return the key under which the node's heart heartbeats."""
    return f"heartbeat/{node}"


def inbox_queue(term: int) -> str:
    """Return the queue of the term's leader. Each has its own, so a deposed one takes nothing away."""
    return f"inbox/{term}/messages"


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What all nodes of a job must say alike, because any of them may become the leader; under the users' names."""

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
        """Say in what these differ from the job's terms; empty if in nothing."""
        pairs = ((name, getattr(self, name), getattr(jobs, name)) for name in self.__slots__)
        return ", ".join(
            f"{name}={ours} where the job has {theirs}" for name, ours, theirs in pairs if ours != theirs
        )


class JobPhase(StrEnum):
    """What the job is doing."""

    FORMING = "forming"  # round `number` waits for its nodes
    RUNNING = "running"  # the nodes of the roster work
    COMPLETED = "completed"  # all of them have succeeded
    CLOSED = "closed"  # there will be no more rounds


@dataclass(frozen=True, slots=True)
class RosterKey:
    """Where the roster of the last round that began is: two terms never write to the same place."""

    term: int
    number: int
    parts: int

    @property
    def prefix(self) -> str:
        """What the keys begin with."""
        return f"roster/{self.term}.{self.number}/"

    @property
    def keys(self) -> list[str]:
        """The keys of the parts, in order."""
        return [f"{self.prefix}{part}" for part in range(self.parts)]


@dataclass(frozen=True, slots=True)
class Refused:
    """This node cannot take part, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that the nodes have agreed on. The leader of the term writes it, until another takes over; but whoever
    ends the job writes that itself.

    `version` makes every written state different from all others. `cause`: why round `number - 1` ended. `largest`: the
    most nodes that a round has had. `joined` and `waiting` (how many nodes wait while others form or run a round) may
    lag behind, and so may `missing`: so many nodes of the last round must come before the next one can begin.
    `has_moved`: the last round began at another place, where others may still be (`quorum`). `spares`: ids
    of those who wait without limit. `job`: the id of the node that made the first state, or another text that no other
    start of a job has.
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

    @property
    def is_open(self) -> bool:
        """Whether the job goes on."""
        return self.phase is JobPhase.FORMING or self.phase is JobPhase.RUNNING

    def is_newer(self, other: JobState, elsewhere: bool) -> bool:
        """Return whether this state counts, and not the other one; `elsewhere`: which comes from another place."""
        if elsewhere and self._begun != other._begun:
            return self._begun > other._begun
        if elsewhere and self.is_open != other.is_open:
            return other.is_open  # who came here first has ended the job
        if self.is_open and other.is_open and self.number != other.number:
            # Who was frozen may have written its old round often since the store has lost its memory.
            return self.number > other.number
        return self.version > other.version

    @property
    def _begun(self) -> int:
        return self.roster.number if self.roster else -1

    def restored(self, leader: str, found: JobState | None, elsewhere: bool = False) -> JobState:
        """Return what to write into a store that has lost this state, and has this older one (or none).

        `elsewhere`: it is not the store where this state was.
        """
        return replace(
            self,
            leader=leader,
            term=max(self.term, found.term if found else 0) + 1,
            version=max(self.version, found.version if found else 0) + 1,
            number=self.number + (self.phase == JobPhase.FORMING),  # somebody may have seen that one begin
            has_moved=self.has_moved or elsewhere,
        )


# What a node says to the leader. `seq` grows with everything that a node says, so what comes again is known.


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The node wants to be in a round later than `after`: it has no workers running.

    `promised`: it has asked elsewhere for a place in the round after this one, and does not know what came of it.
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
    """The node goes away, on purpose. Its workers end within `ends_within_ns`; 0: it has none."""

    seq: int
    id: str
    host: str
    reason: str
    ends_within_ns: int = 0


Message = JoinRequest | FailureReport | SuccessReport | LeaveNotice


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life: different each time. `succeeded`: the latest round in which all workers of the node succeeded.

    It outlives the node, so a node that dies after its work was done is no loss.
    """

    count: int
    succeeded: int
