"""Ranks agree on the next operations: a `Coordinator` on rank 0, a `Requester` on every rank. Pure.

Rules

1. A tensor whose name and signature are cached (a hit) needs no negotiation: the hot path finds out when all ranks have
   submitted it. Anything else (a miss) is a `Request`, which travels in the next cold round.
2. In a cold round the coordinator takes the requests of all ranks, merged (`core.merging`), and makes of them a part of
   one ordered stream, which every member applies, item by item. What the hot path executes lies in the same order
   between two cold rounds.
3. A name is decided once all ranks have requested it: they run it, or they all fail with the same reason. So a mistake
   costs one operation and the next one works.
4. Caches change by the stream alone, at the same place of it on every rank, so they never disagree. That a slot is
   evicted is always said, never inferred.
5. A request for a name that is cached says that its rank has a new signature for it. The slot is evicted at once: ranks
   for which it still was a hit, and may be waiting in vain, then request the name too.
6. A rank that has joined submits nothing until all have, and counts as having requested everything: it is absent from
   what it has not requested, and contributes neutral elements. What is pending on it as a hit when it joins becomes a
   request again (its shell hands it to `request_again` first), so that whatever joined ranks wait for is in the table,
   and is decided before all go on. A response that would be another without the joined ranks is not cached meanwhile.
7. Once a rank has left, nothing is decided any more. What every rank had requested by then is still run first.

Theory of operation

On the coordinator a name is in one state at a time: unknown, waiting (in the table, from the first request to the
last) or cached. Waiting ends with Run or Fail; Run leads to cached if there is a slot; that ends by a request for the
name or when another name needs the slot. On a member a name is in flight from `submit` or `request_again` until Execute
or Failed.

An eviction may meet a hit that was submitted and not decided. The shell, which keeps the hits, takes it back and hands
its request to `request_again`; it must do so before anybody can submit that name again. The hot path decides nothing
while some rank has still to apply a cold round, and so never takes a hit on what a slot held before for one on what it
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ronde.core.call_sites import CallSites
from ronde.core.merging import Batch, Contribution, batch_of, ranks_of, requests_of
from ronde.core.messages import (
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
from ronde.core.rank_set import RankSet
from ronde.core.request_matching import find_problem, response_rows
from ronde.core.response_cache import ResponseCache
from ronde.errors import PeerLostError, ProtocolError, UsageError
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
    "Requester",
    "IncompleteName",
]


class IncompleteName(NamedTuple):
    """A name that some ranks have requested, and those that have not."""

    name: str
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(slots=True)
class _Gathering:
    """What has been requested under one name, and by how many ranks."""

    contributions: list[Contribution] = field(default_factory=list)
    count: int = 0


class Coordinator:
    """Decides what all ranks do, and in which order. There is one, on rank 0."""

    def __init__(self, size: int, capacity: int, names: Sequence[int] | None = None) -> None:
        """`names`: by rank, the number by which messages call it; its rank, if None."""
        self._size = size
        self._names = range(size) if names is None else names
        self._cache = ResponseCache(capacity)
        self._all_ranks = RankSet.up_to(size)
        self._table: dict[str, _Gathering] = {}  # by name, the longest waiting first
        self._responded: dict[int, Request] = {}  # by slot: whose response it holds
        self._joined: dict[int, None] = {}  # in the order in which they did
        self._call_sites = CallSites(self._names)
        self._tuned: list[StreamItem] = []  # said in the next step
        self._leaving: int | None = None  # a rank that has said so, in the round before the last
        self._is_over = False

    @property
    def cache(self) -> ResponseCache:
        """Which names have which slots, once all members have applied what was decided so far."""
        return self._cache

    def step(self, requests: Sequence[Sequence[Message]], used: Sequence[int] = ()) -> list[StreamItem]:
        """The same as `step_merged`, with what each rank says by itself."""
        return self.step_merged(
            [batch_of(RankSet.of([rank]), messages) for rank, messages in enumerate(requests)], used
        )

    def step_merged(self, batches: Sequence[Batch], used: Sequence[int] = ()) -> list[StreamItem]:
        """Return the next part of the stream.

        `batches`: what the ranks say in this round; each of them is in one batch. `used`: the slots that the hot path
        has executed since the last step, the latest last. Raises ProtocolError if a rank's message is malformed; then
        the world is broken.
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
            # Others may have submitted something before, which came too late for this round: so there is one more.
            self._leaving = min(leaving)
            stream.append(Leaving(self._leaving))
        return stream

    def tune(self, values: Tune) -> None:
        """Have all ranks take over these values at the beginning of the next step."""
        self._tuned.append(values)

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call, which rank 0 logs."""
        return self._call_sites.take_warnings()

    def waiting_names(self) -> list[IncompleteName]:
        """Return the names that some ranks still have to request, the longest waiting first."""
        return [
            IncompleteName(
                name, tuple(ranks_of(gathering.contributions)), tuple(self._missing_ranks(gathering))
            )
            for name, gathering in self._table.items()
        ]

    def _missing_ranks(self, gathering: _Gathering) -> list[int]:
        there = ranks_of(gathering.contributions)
        return [rank for rank in self._all_ranks if rank not in there and rank not in self._joined]

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
        """Whether the response is the same with and without the ranks that have joined."""
        if request.kind == Kind.barrier:
            return False  # never: there is nothing to be gained
        if request.kind in (Kind.allgather, Kind.alltoall) or request.is_in_device_memory:
            return not self._joined
        return request.kind != Kind.broadcast or request.root not in self._joined

    def _evict(self, name: str, stream: list[StreamItem]) -> None:
        slot = self._cache.remove(name)
        if slot is not None:
            del self._responded[slot]
            stream.append(Evict(slot))

    def _decide_name(self, gathering: _Gathering, stream: list[StreamItem]) -> None:
        """What becomes of a name that all ranks have requested, but for those that have joined."""
        there = ranks_of(gathering.contributions)
        absent = tuple(rank for rank in sorted(self._joined) if rank not in there)
        by_rank = requests_of(gathering.contributions)
        lowest = by_rank[there.first]
        reason = find_problem(
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
        stream.append(Run(lowest, response_rows(by_rank, self._size), slot, absent))


# What a member has its shell do.


@dataclass(frozen=True, slots=True)
class Insert:
    """The slot holds this now: from here on the own request is a hit. Its Execute follows."""

    slot: int
    request: Request
    run: Run


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute the own request as the run says, before anything that comes later."""

    request: Request
    run: Run


@dataclass(frozen=True, slots=True)
class Contribute:
    """Take part in the run with neutral elements: this rank has joined."""

    run: Run


@dataclass(frozen=True, slots=True)
class Failed:
    """The own request will not run. `left`: the rank that has left, or -1 if ranks have submitted different things."""

    request: Request
    reason: str
    left: int = -1


@dataclass(frozen=True, slots=True)
class Evicted:
    """The slot holds nothing any more. If a hit is pending on it, take it back and call `Requester.request_again`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Closed:
    """This rank has left: hits that are pending fail, and nothing comes any more."""

    rank: int


# Joined, AllJoined, Tune and Leaving are passed on as they are. After a Leaving every rank wants one more cold round.
Effect = Insert | Execute | Contribute | Failed | Evicted | Joined | AllJoined | Tune | Leaving | Closed


def _empty(tensors: Sequence[TensorType]) -> list[TensorType]:
    return [TensorType(each.dtype, (0,)) for each in tensors]


class Requester:
    """One rank's part: what it has requested, and its replica of the cache. Its shell locks it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._queue: list[Message] = []
        self._in_flight: dict[str, Request] = {}  # as misses, whether sent or not
        self._cached: dict[str, tuple[Request, Run, int]] = {}
        self._name_by_slot: dict[int, str] = {}
        self._wants_to_join = self._has_joined = False
        self._wants_to_leave = self._has_said_so = False
        self._is_last = False  # the next cold round
        self._left: int | None = None  # the rank that has left

    def submit(self, request: Request, site: str = "") -> int | None:
        """Return the slot on which it is a hit, or None: it will travel in the next cold round.

        `site`: the line that calls an operation without a name; it travels with a miss. Empty: nobody compares it.
        Raises UsageError (a ValueError) if the name is in flight as a miss or this rank has joined or is leaving,
        PeerLostError if a rank has left.
        """
        if self._left is not None:
            raise PeerLostError(f"rank {self._left} has left", self._left)
        if self._wants_to_leave:
            raise UsageError(f"tensor '{request.name}' is submitted although this rank is leaving")
        if self._wants_to_join:
            raise UsageError(
                f"tensor '{request.name}' is submitted although this rank has joined: wait until all have"
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
        """Request anew what was a hit on a slot that has been evicted, and had not been decided."""
        self._refuse_twice(request)
        self._queue_request(request)

    def announce_join(self) -> None:
        """Say in the next cold round that this rank has run out of data, until AllJoined.

        Until that round nothing is submitted any more. Raises UsageError if it has said so already.
        """
        if self._wants_to_join:
            raise UsageError("this rank has joined already: wait until all have")
        self._wants_to_join = True

    @property
    def takes_back_hits(self) -> bool:
        """Whether hits that are pending must be `request_again` as the cold round begins: it has to know of all."""
        return self._is_last or self._is_joining

    @property
    def _is_joining(self) -> bool:
        return self._wants_to_join and not self._has_joined

    def announce_leave(self) -> None:
        """Say in the next cold round that this rank submits nothing more. A second call does nothing.

        What all ranks have submitted before still runs; the rest fails with the round after that.
        """
        self._wants_to_leave = True

    def take_outbox(self) -> list[Message]:
        """Return what this rank sends in the cold round that begins."""
        messages, self._queue = self._queue, []
        if self._is_joining and self._left is None:
            self._has_joined = True
            messages.append(JoinData())
        if self._wants_to_leave and not self._has_said_so and self._left is None:
            self._has_said_so = True
            messages.append(LeaveEngine())
        return messages

    def cached_response(self, name: str) -> tuple[Request, Run, int] | None:
        """Return the own request, the response and the slot that the cache has for the name."""
        return self._cached.get(name)

    def cached_names(self) -> dict[int, str]:
        """Return the name that each used slot holds."""
        return dict(self._name_by_slot)

    def apply_item(self, item: StreamItem) -> list[Effect]:
        """Return what to do, in order. Raises ProtocolError if the item contradicts what came before."""
        if self._left is not None:
            raise ProtocolError(f"{item} comes after rank {self._left} has left")
        match item:
            case Run():
                return self._apply_run(item)
            case Evict(slot):
                name = self._name_by_slot.pop(slot, None)
                if name is None:
                    raise ProtocolError(f"slot {slot} is evicted, which holds nothing")
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
                f"tensor '{request.name}' is in flight already: wait for it before it is submitted again"
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
        """Memory is going to be written by these numbers, so they had better fit."""
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
