"""The state of a job: what its nodes share in the store, how it is encoded, and what each node knows of it. Pure.

Keys, all under the job's prefix

    state               the `JobState`, changed by compare-and-set only
    roster/T.N/P        part P of the nodes of round N, as decided in term T; written before the state names it
    inbox/T/messages    a queue: the messages to the leader of term T
    alive/ID            held by node ID while it lives
    sentinel/ID         held by node ID, and set by it to another value: see `rendezvous/liveness`
    heartbeat/ID        the `Heartbeat` of node ID, written every heartbeat; stays until a round begins without the node

A value is `ronde 4 ["JoinRequest", ...]`: the number of the encoding, because nodes of one job run one version, and
what `typed_json` writes.

1. Nodes change the state by compare-and-set only, and no two states are equal: a node that builds on an outdated state
   learns so from the value that comes back. It has one write under way at a time (`StateReplica`).
2. A node that comes to a store, or comes back, first reads the state there (`StoreIdentity`). If it is the known state
   or a newer one, it counts. The store may also have lost its data, or be another one in its place: then the node that
   knows most writes its state. A node that knows of no round waits a moment for a node that does; so does a node that
   was frozen just now, because the others may have gone on and may arrive a moment later. Until the matter is settled,
   the node takes part in nothing here. A state with a later roster is newer, whatever its version.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from functools import lru_cache
from typing import TypeVar, get_args

from ronde.errors import ProtocolError, VersionError
from ronde.rendezvous.effects import Compare, Effect, FindChanges, Set, Values
from ronde.rendezvous.membership import (
    Budget,
    ChangeRequested,
    Failure,
    Node,
    NodesLost,
    NodesWaiting,
    Rules,
    WorkerFailed,
)
from ronde.typed_json import TypedJson

__all__ = [
    "ALIVE",
    "PART_NODES",
    "STATE",
    "Heartbeat",
    "Cause",
    "ChangeRequest",
    "FailureReport",
    "JoinRequest",
    "MESSAGES",
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
    "VERSION",
    "decode",
    "decode_roster",
    "decode_state",
    "encode",
    "encode_roster",
    "StateReplica",
    "Finding",
    "StoreIdentity",
]

STATE = "state"
ALIVE = b"alive"  # the value of a held key; only its presence matters
PART_NODES = 2000  # of a roster, in one key: a store's value has at most 1 MiB
PART_LIMIT_BYTES = 8 << 20  # when unpacked
VERSION = 4  # of the encoding

Value = TypeVar("Value")

Cause = WorkerFailed | NodesLost | NodesWaiting | ChangeRequested


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
    of the job. `previous`: the number of the round that had begun before the last one. `alive`: how many nodes of the
    roster have not been lost, also after they had succeeded. `joined`, `waiting`, `missing` and `alive` only inform
    users, and may lag behind.
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
    cause: WorkerFailed | NodesLost | NodesWaiting | ChangeRequested | None = None
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
    previous: int = -1

    @property
    def is_open(self) -> bool:
        """Whether the job goes on: it is neither completed nor closed."""
        return self.phase is JobPhase.FORMING or self.phase is JobPhase.RUNNING

    def is_newer(self, other: JobState) -> bool:
        """Return whether this state counts rather than the other, which may be from another store.

        Versions alone do not tell: a node that was frozen or cut off may have written an old state with a high version
        into a store that had lost its data. That may even name a later round, which the node wanted to form.
        """
        if self._begun != other._begun:
            return self._begun > other._begun
        if self.is_open != other.is_open:
            return other.is_open  # a job that has ended for some nodes ends for all
        if self.number != other.number:
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


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """The node asks for the end of this round, without a failure."""

    seq: int
    id: str
    round: int
    reason: str


Message = JoinRequest | FailureReport | SuccessReport | LeaveNotice | ChangeRequest
MESSAGES: tuple[type[Message], ...] = get_args(Message)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life. `count`: grows; `succeeded`: the latest round in which all workers of the node succeeded.

    `awaits_exit`: a worker of the node has left the other ranks, and its exit code is not known yet.
    The heartbeat outlives the node, so a node that dies after it has succeeded is no loss.
    """

    count: int
    succeeded: int
    awaits_exit: bool = False


# The encoding

_VALUES: TypedJson[JobState | Heartbeat | Message] = TypedJson(
    JobState | Heartbeat | Message, "message of a rendezvous"
)
_NODES: TypedJson[tuple[Node, ...]] = TypedJson(tuple[Node, ...], "roster of a rendezvous")


def encode(value: JobState | Heartbeat | Message) -> bytes:
    """Return the value to write."""
    return _with_version(_VALUES.encode(value))


def decode(data: bytes, *kinds: type[Value]) -> Value:
    """Return what the value says, which is of one of these kinds. Raises ProtocolError or VersionError."""
    value = _VALUES.decode(_without_version(data))
    if not isinstance(value, kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ProtocolError(f"a {type(value).__name__} of a rendezvous where {wanted} is expected")
    return value


@lru_cache(maxsize=16)
def decode_state(data: bytes) -> JobState:
    """Return the state. Raises ProtocolError or VersionError."""
    return decode(data, JobState)


def encode_roster(nodes: Sequence[Node]) -> list[bytes]:
    """Return the parts in which the nodes are written, packed: hosts are much alike."""
    parts = range(0, max(len(nodes), 1), PART_NODES)
    return [_pack(tuple(nodes[first : first + PART_NODES])) for first in parts]


@lru_cache(maxsize=4)
def decode_roster(parts: tuple[bytes, ...]) -> tuple[Node, ...]:
    """Return the nodes, by group rank. Raises ProtocolError or VersionError."""
    nodes: list[Node] = []
    for part in parts:
        try:
            unpacked = zlib.decompressobj().decompress(part, PART_LIMIT_BYTES)
        except zlib.error:
            raise ProtocolError(f"this is no roster of a rendezvous: {part[:60]!r}") from None
        nodes += _NODES.decode(_without_version(unpacked))
    return tuple(nodes)


def _pack(nodes: tuple[Node, ...]) -> bytes:
    return zlib.compress(_with_version(_NODES.encode(nodes)), 1)


def _with_version(text: bytes) -> bytes:
    return b"ronde %d " % VERSION + text


def _without_version(data: bytes) -> bytes:
    name, _, rest = data.partition(b" ")
    version, _, text = rest.partition(b" ")
    if name != b"ronde" or not version.isdigit():
        raise ProtocolError(f"this is not of a rendezvous: {data[:60]!r}")
    if version != b"%d" % VERSION:
        raise VersionError(
            f"another node speaks version {version[:20].decode()} of the rendezvous, this one speaks {VERSION}"
        )
    return text


# What a node knows of the state


class StateReplica:
    """The copy. `state`: as last read, from `raw`; `roster`: as last read, by group rank; `writing`: under way.

    `replaced`: the state that the last write replaces.
    """

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.raw = b""
        self.roster: tuple[Node, ...] = ()
        self.writing: bytes | None = None
        self.replaced: JobState | None = None
        self._roster_key: RosterKey | None = None  # of `roster`
        self._draft: tuple[RosterKey, tuple[Node, ...]] | None = None  # a roster under way

    @property
    def is_open(self) -> bool:
        """Whether there is a job that goes on."""
        return self.state is not None and self.state.is_open

    @property
    def is_whole(self) -> bool:
        """Whether the copy includes the roster that the state names, if it names one."""
        return self.state is not None and self.state.roster == self._roster_key

    # Reading

    def forget_state(self) -> None:
        """Forget the state, so that the next one read counts whatever its version."""
        self.state, self.raw = None, b""

    def read_state(self, raw: bytes) -> bool:
        """Take over this state; return whether it is a new one. Raises ProtocolError or VersionError."""
        state = decode_state(raw)
        if self.state and state.version <= self.state.version:
            return False  # an older state that arrived late
        self.state, self.raw = state, raw
        if self._draft and self._draft[0] == state.roster:
            self._roster_key, self.roster = self._draft
        return True

    def request_roster(self) -> list[Effect]:
        """Return the effect that reads the roster which the state names, if it names one."""
        return (
            [FindChanges(dict.fromkeys(self.state.roster.keys))] if self.state and self.state.roster else []
        )

    def read_roster(self, found: Values) -> bool:
        """Take over the roster if `found` is all of it; return whether it is. Raises ProtocolError or VersionError."""
        state = self.state
        parts = [found.get(key) for key in state.roster.keys] if state and state.roster else [None]
        if state is None or None in parts:
            return False  # the roster of another state
        self.roster, self._roster_key = decode_roster(tuple(part for part in parts if part)), state.roster
        return True

    # Writing

    def write_state(self, state: JobState, roster: tuple[Node, ...] | None = None) -> list[Effect]:
        """Return the effects that replace the known state by this one, after writing its roster if one is given."""
        effects: list[Effect] = []
        if state.roster and roster is not None:
            self._draft = state.roster, roster  # it counts once the state names it
            effects.append(Set(dict(zip(state.roster.keys, encode_roster(roster)))))
        self.writing, self.replaced = encode(state), self.state
        return [*effects, Compare(self.raw, self.writing)]


class Finding(Enum):
    """Which state counts."""

    THEIRS = auto()  # the one found in the store
    OURS = auto()  # the one that this node knows, which it must write here
    NONE = auto()  # there is no job yet
    UNCLEAR = auto()  # perhaps one that another node knows, and will write


class StoreIdentity:
    """Judges a store by its state. `is_unclear`: not judged yet; `is_elsewhere`: it is not the store that was known."""

    def __init__(self, replica: StateReplica) -> None:
        self.is_unclear = False
        self.is_elsewhere = False
        self._replica = replica
        self._may_wait_for_others = False  # once: for nodes that know more

    @property
    def is_away(self) -> bool:
        """Whether the others may look for this node at another store."""
        return self.is_unclear or self.is_elsewhere

    def reset(self) -> None:
        """Judge the store again."""
        self._may_wait_for_others = self.is_unclear = True

    def judge_state(self, raw: bytes, theirs: JobState | None, is_behind: bool = False) -> Finding:
        """Judge the state that was found.

        `raw`: its text, b"" if there is none; `theirs`: its meaning. `is_behind`: the state that this node knows may be
        an old one.
        """
        replica, mine = self._replica, self._replica.state
        may_wait, self._may_wait_for_others = self._may_wait_for_others, False
        if theirs and (mine is None or raw == replica.raw or theirs.is_newer(mine)):
            self.is_unclear = False
            return Finding.THEIRS
        self.is_unclear = True  # until a state is written, by this node or one that knows more
        is_enough = mine is not None and mine.roster is not None and not is_behind
        if mine and replica.is_whole and (is_enough or not may_wait):
            return Finding.OURS
        if mine or may_wait:
            return Finding.UNCLEAR
        self.is_unclear = False
        return Finding.NONE

    @property
    def is_settled(self) -> bool:
        """Whether the nodes meet here, and cannot do so elsewhere."""
        state = self._replica.state
        return state is not None and not self.is_unclear and not state.has_moved

    @property
    def is_redirecting(self) -> bool:
        """Whether to redirect nodes here: a round goes on, or may begin as soon as they arrive."""
        state = self._replica.state
        if state is None or not self.is_settled:
            return False
        return state.phase == JobPhase.RUNNING or (state.phase == JobPhase.FORMING and not state.missing)

    @property
    def present_nodes(self) -> list[str] | None:
        """The nodes of the running round, which surely are here; [] without one, None if the identity is unclear."""
        state = self._replica.state
        if state is None or not self.is_settled:
            return None
        is_known = state.phase == JobPhase.RUNNING and self._replica.is_whole
        return [node.id for node in self._replica.roster] if is_known else []
