"""Merges equal messages of many ranks, along the tree of hosts, in a negotiation round. Pure.

Hundreds of ranks request the same tensors. The leader of a host turns their requests into a `Batch`, which contains
each request once, with the set of its ranks; it merges this with the batches of its children and sends the result to
its parent. So rank 0 receives and does as much for a hundred ranks as for ten thousand.

Requests that differ only where ranks may differ, in the rows that they gather or exchange, are merged as well; the
batch keeps the rows by rank. Requests that must not differ are never merged, so that the coordinator can name the
ranks.

The tree has host 0 at the top, and up to `arity` hosts under each. Hosts are numbered in the order of their lowest
ranks, so rank 0 leads host 0. The levels fill one after the other: under host h are the hosts h * arity + 1 to
h * arity + arity, as far as they exist. `cpp/engine/tree.h` computes the same tree, and a test compares the two.

A batch travels as lines: as JSON, the ranks (empty: all of the batch) and the rows by rank (empty: those of the
message), then a tab and the message in the form of `ronde.engine.messages`. Equal messages have equal texts, so a
leader parses each text once. An empty batch has no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ronde.engine.messages import (
    CallSite,
    JoinData,
    LeaveEngine,
    Message,
    Request,
    decode_requests,
    encode_requests,
)
from ronde.errors import ProtocolError
from ronde.rank_set import RankSet
from ronde.typed_json import Natural, TypedJson

__all__ = [
    "Batch",
    "BatchReader",
    "Contribution",
    "batch_of",
    "batch_of_outboxes",
    "children_of",
    "encode_batch",
    "merge_batches",
    "merge_contributions",
    "parent_of",
    "ranks_of",
    "ranks_under",
    "requests_of",
]

Rows = tuple[int, ...]  # the number of rows of a rank, then its splits, if any

_ABOUT: TypedJson[tuple[tuple[tuple[int, int], ...], tuple[Rows, ...]]] = TypedJson(
    tuple[tuple[tuple[Natural, Natural], ...], tuple[Rows, ...]], "batch of the negotiation"
)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A message of some ranks. `message`: the lowest rank's; `rows`: of each rank in order, () if all are equal."""

    ranks: RankSet
    message: Message
    rows: tuple[Rows, ...] = ()

    def rows_by_rank(self) -> list[tuple[int, Rows]]:
        """Return the ranks in order, each with its rows."""
        return list(zip(self.ranks, self.rows or (_rows_of(self.message),) * len(self.ranks)))

    def requests(self) -> dict[int, Request]:
        """Return the request of each rank."""
        assert isinstance(self.message, Request)
        return {rank: _with_rows(self.message, rows) for rank, rows in self.rows_by_rank()}

    def request(self, rank: int) -> Request:
        """Return the request of one of the ranks."""
        assert isinstance(self.message, Request)
        return self.requests()[rank] if self.rows else self.message


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of these ranks in one negotiation round: call sites and requests, then JoinData and LeaveEngine."""

    ranks: RankSet
    contributions: tuple[Contribution, ...] = ()


def batch_of(ranks: RankSet, messages: Sequence[Message]) -> Batch:
    """Return the batch of ranks that all send these messages. Raises ProtocolError if a message follows a leave."""
    if any(isinstance(message, LeaveEngine) for message in messages[:-1]):
        raise ProtocolError(f"rank {ranks.first} sends a message after it has left")
    return Batch(ranks, tuple([Contribution(ranks, message) for message in messages]))


def batch_of_outboxes(outboxes: Mapping[int, bytes]) -> Batch:
    """Return the batch of ranks that send these encoded messages, by rank. Raises ProtocolError if one is malformed."""
    ranks_by_text: dict[bytes, list[int]] = {}
    for rank, text in outboxes.items():
        ranks_by_text.setdefault(text, []).append(rank)
    return merge_batches(
        [batch_of(RankSet.of(ranks), decode_requests(text)) for text, ranks in ranks_by_text.items()]
    )


def _common_part(message: Message) -> Message:
    """Return the message without the fields that may differ between ranks: equal common parts can be merged."""
    if isinstance(message, Request) and message.is_uneven and message.shape:
        return replace(message, shape=(0, *message.shape[1:]), splits=())
    return message


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the messages of all these. Raises ProtocolError if a rank sends a message twice."""
    if len(batches) == 1 and len(batches[0].ranks) == 1:
        return batches[0]
    merged = merge_contributions([contribution for batch in batches for contribution in batch.contributions])
    merged.sort(
        key=lambda contribution: (CallSite, Request, JoinData, LeaveEngine).index(type(contribution.message))
    )
    return Batch(_union(batch.ranks for batch in batches), tuple(merged))


def merge_contributions(contributions: Iterable[Contribution]) -> list[Contribution]:
    """Return the contributions, with equal ones merged. Raises ProtocolError if a rank makes one twice."""
    by_part: dict[Message, list[Contribution]] = {}
    for each in contributions:
        by_part.setdefault(_common_part(each.message), []).append(each)
    return [each[0] if len(each) == 1 else _merge_equal(each) for each in by_part.values()]


def ranks_of(contributions: Iterable[Contribution]) -> RankSet:
    """Return the ranks of contributions about the same tensor. Raises ProtocolError if a rank occurs twice."""
    contributions = list(contributions)
    try:
        return RankSet.union(each.ranks for each in contributions)
    except ValueError as error:
        message = contributions[0].message
        what = "joined or left"
        if isinstance(message, Request | CallSite):
            what = f"requested tensor '{message.name}'"
        raise ProtocolError(f"{str(error).removesuffix(' comes twice')} has {what} twice") from None


def requests_of(contributions: Sequence[Contribution]) -> dict[int, Request]:
    """Return the requests for one name by rank, in order; of ranks with equal requests, only the lowest.

    Where ranks may differ, all ranks are there. Raises ProtocolError if a rank occurs twice.
    """
    by_rank: dict[int, Request] = {}
    for each in sorted(merge_contributions(contributions), key=lambda each: each.ranks.first):
        assert isinstance(each.message, Request)
        by_rank |= each.requests() if each.message.is_uneven else {each.ranks.first: each.message}
    return {rank: by_rank[rank] for rank in sorted(by_rank)}


def _merge_equal(contributions: Sequence[Contribution]) -> Contribution:
    """Return one contribution for several whose messages have the same common part."""
    ranks = ranks_of(contributions)
    first = contributions[0].message
    if all(each.message == first and not each.rows for each in contributions):
        return Contribution(ranks, first)
    rows = sorted(pair for each in contributions for pair in each.rows_by_rank())
    assert isinstance(first, Request)
    return Contribution(ranks, _with_rows(first, rows[0][1]), tuple([each for _, each in rows]))


def _union(sets: Iterable[RankSet]) -> RankSet:
    try:
        return RankSet.union(sets)
    except ValueError as error:
        raise ProtocolError(f"two batches contain the same rank: {error}") from None


def _rows_of(message: Message) -> Rows:
    return (message.rows, *message.splits) if isinstance(message, Request) else ()


def _with_rows(request: Request, rows: Rows) -> Request:
    if not request.shape:
        return request
    return replace(request, shape=(rows[0], *request.shape[1:]), splits=rows[1:])


# How batches travel


def encode_batch(batch: Batch) -> bytes:
    """Return the bytes that `BatchReader.read` understands."""
    return b"\n".join([_line(contribution, batch.ranks) for contribution in batch.contributions])


def _line(contribution: Contribution, batch_ranks: RankSet) -> bytes:
    ranks, rows = contribution.ranks, contribution.rows
    ranges = () if ranks == batch_ranks else ranks.ranges
    about = _ABOUT.encode((ranges, rows)) if ranges or rows else b""
    return about + b"\t" + encode_requests([contribution.message])


class BatchReader:
    """Reads batches for one merge, and parses texts that they have in common once."""

    def __init__(self) -> None:
        self._messages: dict[bytes, Message] = {}

    def read(self, data: bytes, ranks: RankSet) -> Batch:
        """Return the batch of these ranks. Raises ProtocolError if it is malformed."""
        return Batch(
            ranks, tuple([self._contribution(line, ranks) for line in data.split(b"\n")] if data else ())
        )

    def _contribution(self, line: bytes, batch_ranks: RankSet) -> Contribution:
        about, tab, text = line.partition(b"\t")
        message = self._messages.get(text)
        if message is None:
            messages = decode_requests(text)
            if not tab or len(messages) != 1:
                raise ProtocolError(f"malformed batch of the negotiation: {line[:80]!r}")
            message = self._messages[text] = messages[0]
        if not about:
            return Contribution(batch_ranks, message)
        ranges, rows = _ABOUT.decode(about)
        try:
            return _contribution_from(ranges, rows, batch_ranks, message)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"malformed batch of the negotiation: {error}") from None


def _contribution_from(
    ranges: tuple[tuple[int, int], ...], rows: tuple[Rows, ...], batch_ranks: RankSet, message: Message
) -> Contribution:
    ranks = batch_ranks
    if ranges:
        if any(first > last for first, last in ranges):
            raise ValueError(f"{str(ranges)[:80]} are not ranges of ranks")
        ranks = RankSet.union(RankSet((each,)) for each in ranges)
        if not ranks.within(batch_ranks):
            raise ValueError("it contains ranks from outside its part of the tree")
    if rows and (not isinstance(message, Request) or not message.is_uneven or len(rows) != len(ranks)):
        raise ValueError(f"rows of {len(rows)} ranks instead of {len(ranks)}")
    if any(not each or each[0] < 0 for each in rows):  # splits may be negative, which the coordinator reports
        raise ValueError(f"{str(rows)[:80]} are not the rows of ranks")
    if rows and rows[0] != _rows_of(message):
        raise ValueError(f"the lowest rank has rows {rows[0]}, which differ from its message")
    return Contribution(ranks, message, rows)


# The tree of hosts


def parent_of(host: int, arity: int) -> int:
    """Return the host above this one; -1 for host 0."""
    return (host - 1) // arity if host > 0 else -1


def children_of(host: int, hosts: int, arity: int) -> range:
    """Return the hosts directly under this one, of `hosts` in all."""
    first = host * arity + 1
    return range(min(first, hosts), min(first + arity, hosts))


def ranks_under(host: int, ranks_of_host: Sequence[Sequence[int]], arity: int) -> RankSet:
    """Return the ranks of this host and of all hosts under it. `ranks_of_host`: the ranks, by host."""
    ranks: list[int] = []
    waiting = [host]
    while waiting:
        each = waiting.pop()
        ranks += ranks_of_host[each]
        waiting += children_of(each, len(ranks_of_host), arity)
    return RankSet.of(ranks)
