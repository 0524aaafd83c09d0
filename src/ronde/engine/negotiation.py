"""Ranks agree on the next operations: a `Coordinator` on rank 0, a `Requester` on every rank. Pure.

Rules

1. A tensor whose name and signature are cached (a hit) needs no negotiation: the hot path notices when all ranks have
   submitted it. Any other tensor (a miss) becomes a `Request`, which travels in the next negotiation round.
2. In a negotiation round, the coordinator turns the merged requests of all ranks (`engine.merging`) into a part of one
   ordered stream, which every rank applies item by item. Entries of the hot path have the same order between two rounds
   on all ranks.
3. A name is decided once all ranks have requested it: they run it, or they all fail it with the same reason. So a
   mistake costs one operation, and the next one works.
4. Only the stream changes caches, at the same place on every rank, so they never disagree. Every eviction is an item of
   the stream, never inferred.
5. A request for a cached name shows that its rank has a new signature for it. The slot is evicted at once, so ranks
   with a pending hit on it request the name, too.
6. A rank that has joined submits nothing until all ranks have joined, and counts as having requested everything: it is
   absent from tensors that it has not requested, and contributes neutral elements. Its pending hits become requests
   when it joins (its shell passes them to `request_again`). So every tensor that joined ranks wait for is in the table
   and is decided before the ranks resume. Responses that depend on the joined ranks are not cached meanwhile.
7. After a rank has left, nothing is decided. Tensors that every rank had requested before still run first.

Theory of operation

On the coordinator, a name is in one state at a time: unknown, waiting (in the table, from the first request to the
last) or cached. Waiting ends with Run or Fail. Run makes it cached if there is a slot, until a rank requests the name
or another name needs the slot. On a rank, a name is in flight from `submit` or `request_again` until Execute or Failed.

An eviction may meet a pending hit. The shell, which keeps the hits, takes it back and passes its request to
`request_again`, before any thread can submit that name again. The hot path decides nothing while a rank still has to
apply a round, so it never confuses a hit on the former content of a slot with one on its present content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ronde.engine.merging import Batch, Contribution, batch_of, ranks_of, requests_of
from ronde.engine.messages import (
    AllJoined,
    CallSite,
    Evict,
    FailTensor,
    JoinData,
    Joined,
    LeaveEngine,
    Leaving,
    Left,
    Message,
    Request,
    Run,
    StreamItem,
    TensorType,
    Tune,
)
from ronde.errors import PeerLostError, ProtocolError, UsageError
from ronde.rank_set import RankSet
from ronde.types import Kind

__all__ = [
    "Closed",
    "Contribute",
    "Coordinator",
    "Effect",
    "Evicted",
    "Execute",
    "Failed",
    "Insert",
    "KEPT_USES",
    "Requester",
    "ResponseCache",
]


@dataclass(slots=True)
class _Gathering:
    """The requests for one name, and the number of ranks that made them."""

    contributions: list[Contribution] = field(default_factory=list)
    count: int = 0


class Coordinator:
    """Decides what all ranks run, and in which order; rank 0 has the only one."""

    def __init__(self, size: int, capacity: int, names: Sequence[int] | None = None) -> None:
        """`names`: by rank, its number in messages (None: its rank)."""
        self._size = size
        self._names = range(size) if names is None else names
        self._cache = ResponseCache(capacity)
        self._all_ranks = RankSet.up_to(size)
        self._table: dict[str, _Gathering] = {}  # by name, the longest waiting first
        self._responded: dict[int, Request] = {}  # by slot: the request whose response it holds
        self._joined: dict[int, None] = {}  # in the order of joining
        self._call_sites = CallSites(self._names)
        self._tuned: list[StreamItem] = []  # for the next step
        self._leaving: int | None = None  # a rank that has announced it, so that one more round follows
        self._is_over = False

    @property
    def cache(self) -> ResponseCache:
        """The slots of names, after all ranks have applied the stream so far."""
        return self._cache

    def step(self, requests: Sequence[Sequence[Message]], used: Sequence[int] = ()) -> list[StreamItem]:
        """Return the same as `step_merged`, from the messages of each rank."""
        return self.step_merged(
            [batch_of(RankSet.of([rank]), messages) for rank, messages in enumerate(requests)], used
        )

    def step_merged(self, batches: Sequence[Batch], used: Sequence[int] = ()) -> list[StreamItem]:
        """Return the next part of the stream.

        `batches`: the messages of this round; each rank is in one batch. `used`: the slots that the hot path has
        executed since the last step, the latest last. Raises ProtocolError if a rank's message is malformed; the world
        has then failed.
        """
        if self._is_over:
            return []
        present = sum(len(batch.ranks) for batch in batches)
        if present != self._size or RankSet.union(batch.ranks for batch in batches) != self._all_ranks:
            raise ProtocolError(f"requests of {present} ranks instead of {self._size}")
        for slot in used:
            self._cache.use(slot)
        stream, self._tuned = self._tuned, []
        leaving: list[int] = []
        for batch in batches:
            for contribution in batch.contributions:
                match contribution.message:
                    case LeaveEngine():
                        leaving.append(contribution.ranks.first)
                    case JoinData():
                        self._add_joined(contribution.ranks, stream)
                    case CallSite():
                        self._call_sites.add(contribution.message, contribution.ranks.first)
                    case Request():
                        self._add_request(contribution.message.name, contribution, stream)
        if self._leaving is not None:
            stream.append(Left(self._leaving))
            self._table.clear()
            self._is_over = True
        elif leaving:
            # One more round: other ranks may have submitted tensors before, too late for this one.
            self._leaving = min(leaving)
            stream.append(Leaving(self._leaving))
        return stream

    def tune(self, values: Tune) -> None:
        """Make all ranks adopt these values at the beginning of the next step."""
        self._tuned.append(values)

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call, for the log of rank 0."""
        return self._call_sites.take_warnings()

    def _add_request(self, name: str, contribution: Contribution, stream: list[StreamItem]) -> None:
        for rank in self._joined:
            if rank in contribution.ranks:
                raise ProtocolError(f"rank {rank} has joined and still requests tensor '{name}'")
        self._evict(name, stream)
        gathering = self._table.get(name) or self._table.setdefault(name, _Gathering())
        gathering.contributions.append(contribution)
        gathering.count += len(contribution.ranks)
        if self._is_complete(gathering):
            self._decide_name(self._table.pop(name), stream)

    def _is_complete(self, gathering: _Gathering) -> bool:
        missing = self._size - gathering.count
        if missing > len(self._joined):
            return False
        there = ranks_of(gathering.contributions)
        return missing == sum(rank not in there for rank in self._joined)

    def _add_joined(self, ranks: RankSet, stream: list[StreamItem]) -> None:
        for rank in ranks:
            if rank in self._joined:
                raise ProtocolError(f"rank {rank} has joined twice")
            self._joined[rank] = None
        for request in list(self._responded.values()):
            if not self._may_be_cached(request):
                self._evict(request.name, stream)
        stream.append(Joined(tuple(ranks)))
        for name in [name for name, gathering in self._table.items() if self._is_complete(gathering)]:
            self._decide_name(self._table.pop(name), stream)
        if len(self._joined) == self._size:
            stream.append(AllJoined(next(reversed(self._joined))))
            self._joined.clear()

    def _may_be_cached(self, request: Request) -> bool:
        """Return whether the response is the same with and without the ranks that have joined."""
        if request.kind == Kind.barrier:
            return False  # a cached barrier would save nothing
        if request.is_uneven or request.is_in_device_memory:
            return not self._joined
        return request.kind != Kind.broadcast or request.root not in self._joined

    def _evict(self, name: str, stream: list[StreamItem]) -> None:
        slot = self._cache.remove(name)
        if slot is not None:
            del self._responded[slot]
            stream.append(Evict(slot))

    def _decide_name(self, gathering: _Gathering, stream: list[StreamItem]) -> None:
        """Run or fail a name that all ranks, except those that have joined, have requested."""
        there = ranks_of(gathering.contributions)
        absent = tuple(rank for rank in sorted(self._joined) if rank not in there)
        by_rank = requests_of(gathering.contributions)
        lowest = by_rank[there.first]
        reason = _find_problem(
            {self._names[rank]: request for rank, request in by_rank.items()}, absent, self._names
        )
        if reason:
            self._call_sites.forget(lowest.name)
            stream.append(FailTensor(lowest.name, reason))
            return
        self._call_sites.compare(lowest.name)
        slot = -1
        if self._may_be_cached(lowest):
            evicted = self._cache.make_room()
            if evicted is not None:
                del self._responded[evicted]
                stream.append(Evict(evicted))
            slot = self._cache.add(lowest.name)
            if slot >= 0:
                self._responded[slot] = lowest
        stream.append(Run(lowest, _response_rows(by_rank, self._size), slot, absent))


# A rank's side: effects are what a Requester's shell does.


@dataclass(frozen=True, slots=True)
class Insert:
    """Store the response in the slot: from now on this rank's request is a hit. Its Execute follows."""

    slot: int
    request: Request
    run: Run


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute this rank's request by the run, before later items."""

    request: Request
    run: Run


@dataclass(frozen=True, slots=True)
class Contribute:
    """Contribute neutral elements to the run, because this rank has joined."""

    run: Run


@dataclass(frozen=True, slots=True)
class Failed:
    """Fail this rank's request. `left`: the rank that has left, or -1 if the requests of the ranks do not match."""

    request: Request
    reason: str
    left: int = -1


@dataclass(frozen=True, slots=True)
class Evicted:
    """Empty the slot. If a hit is pending on it, take it back and call `Requester.request_again`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Fail all pending hits: this rank has left, and no item follows."""

    rank: int


# Joined, AllJoined, Tune and Leaving are effects, too. After a Leaving every rank wants one more negotiation round.
Effect = Insert | Execute | Contribute | Failed | Evicted | Joined | AllJoined | Tune | Leaving | Closed


def _empty(tensors: Sequence[TensorType]) -> list[TensorType]:
    return [TensorType(each.dtype, (0,)) for each in tensors]


class Requester:
    """One rank's requests, and its replica of the cache. Its shell holds a lock around every call."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._queue: list[Message] = []
        self._in_flight: dict[str, Request] = {}  # as misses, whether sent or not
        self._cached: dict[str, tuple[Request, Run, int]] = {}
        self._name_by_slot: dict[int, str] = {}
        self._wants_to_join = self._has_joined = False
        self._wants_to_leave = self._has_announced_leave = False
        self._is_last = False  # the next negotiation round
        self._left: int | None = None  # the rank that has left

    def submit(self, request: Request, site: str = "") -> int | None:
        """Return the slot of a hit, or None for a miss, which travels in the next negotiation round.

        `site`: the line that calls an operation without a name, which travels with a miss; "": do not compare lines.
        Raises UsageError (a ValueError) if the name is in flight as a miss or this rank has joined or is leaving,
        PeerLostError if a rank has left.
        """
        if self._left is not None:
            raise PeerLostError(f"rank {self._left} has left", self._left)
        if self._wants_to_leave:
            raise UsageError(f"tensor '{request.name}' cannot be submitted: this rank is leaving")
        if self._wants_to_join:
            raise UsageError(
                f"tensor '{request.name}' cannot be submitted: this rank has joined; wait until all ranks have joined"
            )
        self._refuse_twice(request)
        cached = self._cached.get(request.name)
        if cached and cached[0] == request:
            return cached[2]
        if site:
            self._queue.append(CallSite(request.name, site))
        self._queue_request(request)
        return None

    def request_again(self, request: Request) -> None:
        """Request a tensor that was a pending hit on an evicted slot."""
        self._refuse_twice(request)
        self._queue_request(request)

    def announce_join(self) -> None:
        """Announce in the next negotiation round that this rank has run out of data.

        The rank submits nothing until AllJoined. Raises UsageError if it has joined already.
        """
        if self._wants_to_join:
            raise UsageError("this rank has joined already: wait until all ranks have joined")
        self._wants_to_join = True

    @property
    def takes_back_hits(self) -> bool:
        """Whether all pending hits go through `request_again` as the next round begins, which decides about them."""
        return self._is_last or self._is_joining

    @property
    def _is_joining(self) -> bool:
        return self._wants_to_join and not self._has_joined

    def announce_leave(self) -> None:
        """Announce in the next negotiation round that this rank leaves. A second call does nothing.

        Tensors that all ranks have submitted before still run; the others fail in the following round.
        """
        self._wants_to_leave = True

    def take_outbox(self) -> list[Message]:
        """Return the messages that this rank sends in the negotiation round that begins."""
        messages, self._queue = self._queue, []
        if self._is_joining and self._left is None:
            self._has_joined = True
            messages.append(JoinData())
        if self._wants_to_leave and not self._has_announced_leave and self._left is None:
            self._has_announced_leave = True
            messages.append(LeaveEngine())
        return messages

    def cached_response(self, name: str) -> tuple[Request, Run, int] | None:
        """Return this rank's request, the response and the slot of a cached name, or None."""
        return self._cached.get(name)

    def cached_names(self) -> dict[int, str]:
        """Return the name that each used slot holds."""
        return dict(self._name_by_slot)

    def apply_item(self, item: StreamItem) -> list[Effect]:
        """Return what to do, in order. Raises ProtocolError if the item contradicts earlier ones."""
        if self._left is not None:
            raise ProtocolError(f"{item} comes after rank {self._left} has left")
        match item:
            case Run():
                return self._apply_run(item)
            case Evict(slot):
                name = self._name_by_slot.pop(slot, None)
                if name is None:
                    raise ProtocolError(f"slot {slot} is evicted, but holds nothing")
                del self._cached[name]
                return [Evicted(slot)]
            case FailTensor(name, reason):
                if self._has_joined and name not in self._in_flight:
                    return []
                return [Failed(self._take_in_flight(name), reason)]
            case Joined() | Tune():
                return [item]
            case Leaving():
                self._is_last = True
                return [item]
            case AllJoined():
                self._wants_to_join = self._has_joined = False
                return [item]
            case Left(rank):
                return self._apply_left(rank)

    def _refuse_twice(self, request: Request) -> None:
        if request.name in self._in_flight:
            raise UsageError(
                f"tensor '{request.name}' is in flight already: wait for it before you submit it again"
            )

    def _queue_request(self, request: Request) -> None:
        self._in_flight[request.name] = request
        self._queue.append(request)

    def _take_in_flight(self, name: str) -> Request:
        request = self._in_flight.pop(name, None)
        if request is None:
            raise ProtocolError(f"tensor '{name}' is decided, but rank {self._rank} has not requested it")
        return request

    def _apply_run(self, run: Run) -> list[Effect]:
        if self._rank in run.absent:
            return self._contribute_to(run)
        request = self._take_in_flight(run.request.name)
        self._check_rows(request, run)
        if run.slot < 0:
            return [Execute(request, run)]
        return [self._insert_response(request, run), Execute(request, run)]

    def _contribute_to(self, run: Run) -> list[Effect]:
        if not self._has_joined or run.request.name in self._in_flight:
            raise ProtocolError(f"rank {self._rank} is absent from tensor '{run.request.name}'")
        self._check_rows(replace(run.request, shape=(0,), more=tuple(_empty(run.request.more))), run)
        if run.slot < 0:
            return [Contribute(run)]
        return [self._insert_response(run.request, run), Contribute(run)]

    def _insert_response(self, request: Request, run: Run) -> Insert:
        if run.slot in self._name_by_slot or request.name in self._cached:
            raise ProtocolError(f"tensor '{request.name}' goes to slot {run.slot} without an eviction")
        self._cached[request.name] = (request, run, run.slot)
        self._name_by_slot[run.slot] = request.name
        return Insert(run.slot, request, run)

    def _check_rows(self, request: Request, run: Run) -> None:
        """Raise ProtocolError unless the rows fit the request: native code writes memory by these numbers."""
        size, rank = self._size, self._rank
        count = len(request.tensors)
        expected = {Kind.allgather: size * count, Kind.alltoall: size * size}.get(request.kind, 0)
        fits = run.request.kind == request.kind and len(run.rows) == expected
        if fits and request.kind == Kind.allgather:
            fits = run.rows[rank::size] == tuple(each.rows for each in request.tensors)
        if fits and request.kind == Kind.alltoall:
            fits = sum(run.rows[rank * size : (rank + 1) * size]) == request.rows
        if not fits:
            raise ProtocolError(f"the response for tensor '{request.name}' is not what rank {rank} requested")

    def _apply_left(self, rank: int) -> list[Effect]:
        self._left = rank
        failed = [Failed(request, f"rank {rank} has left", rank) for request in self._in_flight.values()]
        self._in_flight.clear()
        self._queue.clear()
        return [*failed, Closed(rank)]


# Whether the requests of all ranks for one name match, and the rows of their response

# The fields that must be the same on all ranks, in the order of comparison; "" is the kind.
_COMPARED = ("", "op", "root", "prescale_factor", "postscale_factor", "device")


def _compared(request: Request) -> tuple[object, ...]:
    """Return the values that must be equal, in the order of _COMPARED, and then those of each tensor."""
    terms = request.kind, request.op, request.root, request.prescale, request.postscale, request.device
    if not request.is_uneven:
        return *terms, request.dtype, request.shape, *request.more
    return *terms, *((each.dtype, _fixed(each.shape, is_uneven=True)) for each in request.tensors)


def _fixed(shape: tuple[int, ...], is_uneven: bool) -> tuple[int, ...]:
    """Return the part of a shape that must be the same on all ranks; an array without axes counts as one row."""
    return (max(len(shape), 1), *shape[1:]) if is_uneven else shape


def _find_problem(by_name: dict[int, Request], absent: Sequence[int], names: Sequence[int]) -> str:
    """Return why the requests for one name do not match; "" if they do.

    `by_name`: in the order of ranks. `absent`: ranks that contribute nothing. `names`: of all ranks.
    """
    first, lowest = next(iter(by_name.items()))
    expected = _compared(lowest)
    for name, request in by_name.items():
        if request != lowest and _compared(request) != expected:
            return _describe_difference(first, lowest, name, request)
    if lowest.kind == Kind.broadcast and not 0 <= lowest.root < len(names):
        return (
            f"{_subject(lowest)}: all ranks submitted broadcast with root {lowest.root}, but there are only ranks 0 to "
            f"{len(names) - 1}"
        )
    if lowest.kind == Kind.broadcast and lowest.root in absent:
        root = names[lowest.root]
        return (
            f"{_subject(lowest)}: the root of the broadcast, rank {root}, has joined: it has nothing to send"
        )
    if lowest.kind == Kind.alltoall and absent:
        return (
            f"{_subject(lowest)}: rank {first} submitted alltoall, but rank {names[absent[0]]} has joined, so its "
            "number of rows is unknown"
        )
    if lowest.is_in_device_memory and absent:
        return (
            f"{_subject(lowest)}: rank {first} submitted it in {lowest.device}, but rank {names[absent[0]]} has "
            "joined and has no tensor in that memory to contribute"
        )
    if lowest.kind == Kind.alltoall:
        return _find_bad_splits(by_name)
    return ""


def _subject(request: Request) -> str:
    return f"{'group' if request.more else 'tensor'} '{request.name}'"


def _describe_difference(first: int, lowest: Request, rank: int, other: Request) -> str:
    text = f"{_subject(lowest)}: rank {first} submitted {lowest.kind.name}"
    if lowest.kind != other.kind:
        return f"{text}, but rank {rank} {other.kind.name}"
    if len(lowest.more) != len(other.more):
        return f"{text} of {len(lowest.tensors)} tensors, but rank {rank} of {len(other.tensors)}"
    is_uneven = lowest.is_uneven
    for index, (ours, theirs) in enumerate(zip(lowest.tensors, other.tensors)):
        which = f" (tensor {index} of the group)" if lowest.more else ""
        if ours.dtype != theirs.dtype:
            return (
                f"{text} with dtype {ours.dtype.name}, but rank {rank} with dtype {theirs.dtype.name}{which}"
            )
        if _fixed(ours.shape, is_uneven) != _fixed(theirs.shape, is_uneven):
            which += " (only the first axis may differ)" if is_uneven else ""
            return f"{text} with shape {ours.shape}, but rank {rank} with shape {theirs.shape}{which}"
    terms = zip(_COMPARED, _compared(lowest), _compared(other))
    label, here, there = next(each for each in terms if each[1] != each[2])
    if label == "op":
        here, there = lowest.op.name, other.op.name
    return f"{text} with {label} {here}, but rank {rank} with {label} {there}"


def _find_bad_splits(by_name: dict[int, Request]) -> str:
    size = len(by_name)
    for rank, request in by_name.items():
        who = f"tensor '{request.name}': rank {rank} submitted alltoall with shape {request.shape}"
        splits = request.splits
        if not splits:
            if request.rows % size:
                return f"{who}, whose first axis cannot be divided equally among {size} ranks"
        elif len(splits) != size or min(splits) < 0 or sum(splits) != request.rows:
            return f"{who} and splits {splits}, which are not {size} numbers of rows that add up to {request.rows}"
    return ""


def _response_rows(by_rank: dict[int, Request], size: int) -> tuple[int, ...]:
    """Return the rows of the response (see messages.Run); ranks that are missing in `by_rank` have no rows."""
    kind = next(iter(by_rank.values())).kind
    if kind == Kind.allgather:
        count = len(next(iter(by_rank.values())).tensors)
        rows = [
            [each.rows for each in by_rank[rank].tensors] if rank in by_rank else [0] * count
            for rank in range(size)
        ]
        return tuple(of_rank[index] for index in range(count) for of_rank in rows)
    if kind == Kind.alltoall:
        requests = [by_rank[rank] for rank in range(size)]
        equal = [request.splits or (request.rows // size,) * size for request in requests]
        return tuple(rows for splits in equal for rows in splits)
    return ()


# The response cache

KEPT_USES = 4  # per slot: how many other uses a name outlives


class ResponseCache:
    """Assigns slots to names: at most `capacity` names, each with a different slot below it. With 0 nothing is cached.

    If a step uses a few more names than there are slots, each name is the least recently used one when its turn comes:
    to evict that would leave no name in the cache that the step uses again. So a name stays until it has not been used
    for `KEPT_USES` uses of others for each slot, and the names in excess are negotiated each time.

    Only the coordinator decides that. The caches of the ranks are replicas that follow its stream, so every removal
    here must become an item there.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity} is invalid: expected 0 or more slots")
        self._capacity = capacity
        self._slot_by_name: dict[str, int] = {}  # the least recently used first
        self._name_by_slot: dict[int, str] = {}
        self._uses = 0  # of all names, cached or not
        self._last_use: dict[str, int] = {}  # of cached names
        self._free = list(range(capacity - 1, -1, -1))  # the next one last

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self._capacity

    def names(self) -> dict[int, str]:
        """Return the name that each used slot holds, the least recently used one first."""
        return {slot: name for name, slot in self._slot_by_name.items()}

    def use(self, slot: int) -> None:
        """Make the slot the most recently used one. Raises ValueError if it holds nothing."""
        name = self._name_by_slot.get(slot)
        if name is None:
            raise ValueError(f"slot {slot} of the response cache cannot be used: it holds nothing")
        self._slot_by_name[name] = self._slot_by_name.pop(name)
        self._count_use(name)

    def remove(self, name: str) -> int | None:
        """Remove the name and return its slot, which is now free; None if it had none."""
        slot = self._slot_by_name.pop(name, None)
        if slot is not None:
            del self._name_by_slot[slot], self._last_use[name]
            self._free.append(slot)
        return slot

    def make_room(self) -> int | None:
        """If no slot is free and the least recently used name is out of use, remove it and return its slot."""
        if self._free or not self._capacity:
            return None
        oldest = next(iter(self._slot_by_name))
        if self._uses - self._last_use[oldest] < KEPT_USES * self._capacity:
            return None
        return self.remove(oldest)

    def add(self, name: str) -> int:
        """Return the slot of a new name; -1 if none is free. Raises ValueError if the name is cached."""
        if name in self._slot_by_name:
            raise ValueError(f"'{name}' is cached already")
        if not self._free:
            self._uses += 1
            return -1
        slot = self._free.pop()
        self._slot_by_name[name] = slot
        self._name_by_slot[slot] = name
        self._count_use(name)
        return slot

    def _count_use(self, name: str) -> None:
        self._uses += 1
        self._last_use[name] = self._uses


# Operations without names

_MOST_WARNINGS = 8


class CallSites:
    """Compares the lines at which ranks call operations without names, and warns if they differ.

    Operations without names match by their order alone. If two ranks call two of them in different order with equal
    shapes, only the lines of the calls show that each result combines different arrays. Different lines are a hint, not
    a proof, because a rank may take another branch of an if. So they are a warning, once for each pair of lines.

    Only misses are compared. A cached name stands for another call in every cycle of names, so a comparison holds for
    one use of it. To compare each use, ranks would have to send its line with an additional message between leaders.
    """

    def __init__(self, names: Sequence[int]) -> None:
        """`names`: by rank, its number in messages."""
        self._names = names
        self._lowest: dict[str, dict[str, int]] = {}  # by name and site: the lowest rank that calls there
        self._seen: set[frozenset[str]] = set()
        self._warnings: list[str] = []

    def add(self, call: CallSite, rank: int) -> None:
        """Record that the rank, and perhaps higher ones, calls the operation at this line."""
        lowest = self._lowest.setdefault(call.name, {})
        lowest[call.site] = min(rank, lowest.get(call.site, rank))

    def compare(self, name: str) -> None:
        """Forget the lines of an operation that runs now; warn if they differ between ranks."""
        calls = sorted((rank, site) for site, rank in self._lowest.pop(name, {}).items())
        for rank, site in calls[1:]:
            self._warn(name, calls[0], (rank, site))

    def forget(self, name: str) -> None:
        """Forget the lines of an operation that fails on all ranks: its error has the reason."""
        self._lowest.pop(name, None)

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _warn(self, name: str, first: tuple[int, str], second: tuple[int, str]) -> None:
        pair = frozenset((first[1], second[1]))
        if pair in self._seen or len(self._seen) == _MOST_WARNINGS:
            return
        self._seen.add(pair)
        here, there = (f"{site} on rank {self._names[rank]}" for rank, site in (first, second))
        self._warnings.append(
            f"unnamed operation '{name}' is called at {here} and at {there}: if these lines pass different arrays, the "
            "result combines them and is wrong; give the operations names (name=...)"
        )
