"""What many ranks say in a cold round, with what is equal said once. Pure.

Hundreds of ranks request the same tensors. The leader of a host makes of their requests a `Batch`, in which each stands
once, with the set of ranks that have it; it merges that with its children's and sends it on to its parent. So what
arrives at rank 0, and the work there, is the same for a hundred ranks and for ten thousand.

Where ranks may differ, in the rows that they gather or exchange, their requests are merged all the same, and the rows
kept by rank. What must not differ is never merged: the coordinator finds who has said what.

A batch travels as lines: the ranks (nothing: all of the batch) and the rows by rank (nothing: as the message says) as
JSON, a tab, and the message as `ronde.core.messages` writes it. The same message makes the same text, so whoever merges
batches has to read it once only. An empty batch is no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ronde.core.messages import (
    CallSite,
    JoinData,
    LeaveEngine,
    Message,
    Request,
    decode_requests,
    encode_requests,
)
from ronde.core.rank_set import RankSet
from ronde.core.typed_json import Natural, TypedJson
from ronde.errors import ProtocolError
from ronde.types import Kind

__all__ = [
    "Batch",
    "BatchReader",
    "Contribution",
    "encode_batch",
    "merge_contributions",
    "merge_batches",
    "ranks_of",
    "requests_of",
    "batch_of",
    "batch_of_outboxes",
]

Rows = tuple[int, ...]  # how many rows a rank has, then its splits, if it has given any

_ABOUT: TypedJson[tuple[tuple[tuple[int, int], ...], tuple[Rows, ...]]] = TypedJson(
    tuple[tuple[tuple[Natural, Natural], ...], tuple[Rows, ...]], "batch of the negotiation"
)
_UNEVEN = (Kind.allgather, Kind.alltoall)


@dataclass(frozen=True, slots=True)
class Contribution:
    """These ranks say this. `message`: the lowest one's; `rows`: of each rank in order, empty if all are equal."""

    ranks: RankSet
    message: Message
    rows: tuple[Rows, ...] = ()

    def rows_by_rank(self) -> list[tuple[int, Rows]]:
        """Return the ranks in order, each with its rows."""
        return list(zip(self.ranks, self.rows or (_rows_of(self.message),) * len(self.ranks)))

    def requests(self) -> dict[int, Request]:
        """Return what each of the ranks has requested."""
        assert isinstance(self.message, Request)
        return {rank: _with_rows(self.message, rows) for rank, rows in self.rows_by_rank()}

    def request(self, rank: int) -> Request:
        """Return what one of the ranks has requested."""
        assert isinstance(self.message, Request)
        return self.requests()[rank] if self.rows else self.message


@dataclass(frozen=True, slots=True)
class Batch:
    """All that these ranks say in one cold round: first call sites and requests, then who joins and who leaves."""

    ranks: RankSet
    contributions: tuple[Contribution, ...] = ()


def batch_of(ranks: RankSet, messages: Sequence[Message]) -> Batch:
    """Return what each of these ranks says. Raises ProtocolError if something comes after a leave."""
    if any(isinstance(message, LeaveEngine) for message in messages[:-1]):
        raise ProtocolError(f"rank {ranks.first} has left and still sends something")
    return Batch(ranks, tuple([Contribution(ranks, message) for message in messages]))


def batch_of_outboxes(outboxes: Mapping[int, bytes]) -> Batch:
    """Return what ranks say whose encoded messages these are: by rank. Raises ProtocolError if they are malformed."""
    ranks_by_text: dict[bytes, list[int]] = {}
    for rank, text in outboxes.items():
        ranks_by_text.setdefault(text, []).append(rank)
    return merge_batches(
        [batch_of(RankSet.of(ranks), decode_requests(text)) for text, ranks in ranks_by_text.items()]
    )


def _common_part(message: Message) -> Message:
    """The message without what may differ between ranks; messages with equal ones can be merged."""
    if isinstance(message, Request) and message.kind in _UNEVEN and message.shape:
        return replace(message, shape=(0, *message.shape[1:]), splits=())
    return message


def merge_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch that says the same as these. Raises ProtocolError if a rank says something twice."""
    if len(batches) == 1 and len(batches[0].ranks) == 1:
        return batches[0]
    merged = merge_contributions([contribution for batch in batches for contribution in batch.contributions])
    merged.sort(
        key=lambda contribution: (CallSite, Request, JoinData, LeaveEngine).index(type(contribution.message))
    )
    return Batch(_union(batch.ranks for batch in batches), tuple(merged))


def merge_contributions(contributions: Iterable[Contribution]) -> list[Contribution]:
    """Return the same with everything once that can be merged. Raises ProtocolError if a rank says it twice."""
    by_part: dict[Message, list[Contribution]] = {}
    for each in contributions:
        by_part.setdefault(_common_part(each.message), []).append(each)
    return [each[0] if len(each) == 1 else _merge_equal(each) for each in by_part.values()]


def ranks_of(contributions: Iterable[Contribution]) -> RankSet:
    """Return who says one of these about the same tensor. Raises ProtocolError if a rank is there twice."""
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
    """Return what has been requested under one name, by rank in order; what many request alike, by the lowest only.

    By every rank where ranks may differ. Raises ProtocolError if a rank is there twice.
    """
    by_rank: dict[int, Request] = {}
    for each in sorted(merge_contributions(contributions), key=lambda each: each.ranks.first):
        assert isinstance(each.message, Request)
        is_uneven = each.message.kind in _UNEVEN
        by_rank |= each.requests() if is_uneven else {each.ranks.first: each.message}
    return {rank: by_rank[rank] for rank in sorted(by_rank)}


def _merge_equal(contributions: Sequence[Contribution]) -> Contribution:
    """One for several whose messages have a common part."""
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
        raise ProtocolError(f"two batches are of the same ranks: {error}") from None


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


def _line(contribution: Contribution, everybody: RankSet) -> bytes:
    ranks, rows = contribution.ranks, contribution.rows
    ranges = () if ranks == everybody else ranks.ranges
    about = _ABOUT.encode((ranges, rows)) if ranges or rows else b""
    return about + b"\t" + encode_requests([contribution.message])


class BatchReader:
    """Reads batches that are going to be merged, and what they have in common once."""

    def __init__(self) -> None:
        self._messages: dict[bytes, Message] = {}

    def read(self, data: bytes, ranks: RankSet) -> Batch:
        """Return the batch of these ranks. Raises ProtocolError if it is malformed."""
        return Batch(
            ranks, tuple([self._contribution(line, ranks) for line in data.split(b"\n")] if data else ())
        )

    def _contribution(self, line: bytes, everybody: RankSet) -> Contribution:
        about, tab, text = line.partition(b"\t")
        message = self._messages.get(text)
        if message is None:
            messages = decode_requests(text)
            if not tab or len(messages) != 1:
                raise ProtocolError(f"malformed batch of the negotiation: {line[:80]!r}")
            message = self._messages[text] = messages[0]
        if not about:
            return Contribution(everybody, message)
        ranges, rows = _ABOUT.decode(about)
        try:
            return _contribution_from(ranges, rows, everybody, message)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"malformed batch of the negotiation: {error}") from None


def _contribution_from(
    ranges: tuple[tuple[int, int], ...], rows: tuple[Rows, ...], everybody: RankSet, message: Message
) -> Contribution:
    ranks = everybody
    if ranges:
        if any(first > last for first, last in ranges):
            raise ValueError(f"{str(ranges)[:80]} are no ranges of ranks")
        ranks = RankSet.union(RankSet((each,)) for each in ranges)
        if not ranks.within(everybody):
            raise ValueError("somebody speaks for ranks that are not its own")
    if rows and (not isinstance(message, Request) or message.kind not in _UNEVEN or len(rows) != len(ranks)):
        raise ValueError(f"rows of {len(rows)} ranks instead of {len(ranks)}")
    if any(not each or each[0] < 0 for each in rows):  # splits may be negative, which the coordinator reports
        raise ValueError(f"{str(rows)[:80]} are not the rows of ranks")
    if rows and rows[0] != _rows_of(message):
        raise ValueError(f"the lowest rank has rows {rows[0]}, which its message has not")
    return Contribution(ranks, message, rows)
