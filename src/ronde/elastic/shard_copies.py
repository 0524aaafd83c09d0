"""Who keeps a copy of whose shard, and what one process has of them, through commits and losses. Pure.

A shard is a rank's share of a state. Each rank has its shard in the memory of the last commit, and sends it to the
*holder*, another rank, on another host if there is one (`holders`).

A commit has two phases. Before its barrier each process saves and sends its shard (`keep_previous`, `begin`), and keeps
what it receives aside (`receive`). After the barrier all processes have the copies of the new commit, and forget those
of the one before (`accept`). If a rank is lost before any process has passed the barrier, the others go back to the
commit before (`go_to`), and so do the copies.

After a loss, or when ranks come, `plan_moves` says which shards go where, so that each rank has its shard again, and
each holder its copy. A process drops a shard only when all processes have theirs (`prune`), so that a loss meanwhile
costs no more than any other.

Only the pieces of a shard that have changed since the last commit are sent. If most of them change each time, no
checksums are made for a while.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ronde.errors import ProtocolError
from ronde.typed_json import Natural, TypedJson

__all__ = ["Move", "Moves", "ShardContent", "ShardCopies", "holders", "messages_in", "plan_moves"]

PIECE_BYTES = 1 << 18
_PAUSE = 8  # commits without checksums, after one in which most pieces have changed
_LENGTH_BYTES = 8


def holders(hosts: Sequence[Hashable]) -> list[int]:
    """Return for each rank the rank that keeps a copy of its shard; -1 for a single rank.

    It is on the next host, if there is one, in the order of the first ranks of hosts. The shards of a host are spread
    over the ranks of that one.

    Args:
        hosts: by rank, the name or number of its host.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    if len(members) == 1:
        return [(rank + 1) % len(hosts) if len(hosts) > 1 else -1 for rank in range(len(hosts))]
    names = list(members)
    following = dict(zip(names, [*names[1:], names[0]]))
    return [
        members[following[host]][members[host].index(rank) % len(members[following[host]])]
        for rank, host in enumerate(hosts)
    ]


class Move(NamedTuple):
    """A rank sends a shard to another."""

    shard: int
    source: int
    target: int


class Moves(NamedTuple):
    """What brings all shards where they belong; `lost`: shards that no process has."""

    moves: tuple[Move, ...]
    lost: tuple[int, ...]


def plan_moves(
    inventories: Sequence[Mapping[int, int]], num_shards: int, commit: int, hosts: Sequence[Hashable]
) -> Moves:
    """Return what brings each rank its shard, and each holder its copy.

    If the number of shards is not the number of ranks, all ranks get all shards.

    Args:
        inventories: by rank, the shards that it has, and of which commit.
        num_shards: the number of ranks that have made the commit.
        commit: to which the job goes back.
        hosts: by rank, the name or number of its host.
    """
    owners = defaultdict(list)
    for rank, inventory in enumerate(inventories):
        for shard, of_commit in inventory.items():
            if of_commit == commit:
                owners[shard].append(rank)
    moves, load = [], Counter[int]()
    for shard in range(num_shards):
        for target in _wanted_at(shard, num_shards, hosts):
            if owners[shard] and target not in owners[shard]:
                source = min(owners[shard], key=lambda rank: (load[rank], hosts[rank] != hosts[target], rank))
                load[source] += 1
                moves.append(Move(shard, source, target))
    return Moves(tuple(moves), tuple(shard for shard in range(num_shards) if not owners[shard]))


def _wanted_at(shard: int, num_shards: int, hosts: Sequence[Hashable]) -> list[int]:
    """Return the ranks that need a shard."""
    if num_shards != len(hosts):
        return list(range(len(hosts)))
    return [rank for rank in (shard, holders(hosts)[shard]) if rank >= 0]


@dataclass(frozen=True)
class ShardContent:
    """A shard's bytes at a commit. `text` describes them; `buffers` may be memory that changes with the next commit."""

    commit: int
    text: str
    buffers: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """The number of bytes in all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def copied(self) -> ShardContent:
        """Return the same in other memory."""
        return ShardContent(self.commit, self.text, (memoryview(bytearray().join(self.buffers)),))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in pieces, whose places do not depend on their values."""
        for buffer in self.buffers:
            for begin in range(0, buffer.nbytes, PIECE_BYTES):
                yield buffer[begin : begin + PIECE_BYTES]


@dataclass(frozen=True)
class _MessageHead:
    """`base`: the commit whose copy the message changes, -1: none. `sizes`: those of the buffers. `pieces`: those that
    follow, by number; all if there is no base.
    """

    shard: Natural
    commit: Natural
    base: int
    text: str
    sizes: tuple[Natural, ...]
    pieces: tuple[Natural, ...]


_HEAD: TypedJson[_MessageHead] = TypedJson(_MessageHead, "copy of a shard")


class _Message(NamedTuple):
    head: _MessageHead
    body: memoryview


def message_with(shard: int, content: ShardContent) -> list[bytes | memoryview]:
    """Return the buffers of a message with the whole content of a shard."""
    sizes = tuple(buffer.nbytes for buffer in content.buffers)
    head = _MessageHead(shard, content.commit, -1, content.text, sizes, ())
    return _framed(head, list(content.buffers))


def _framed(head: _MessageHead, body: Sequence[memoryview]) -> list[bytes | memoryview]:
    text = _HEAD.encode(head)
    lengths = [len(text), sum(each.nbytes for each in body)]
    return [b"".join(length.to_bytes(_LENGTH_BYTES, "little") for length in lengths), text, *body]


def messages_in(data: memoryview) -> Iterator[_Message]:
    """Yield the messages of received bytes. Raises ProtocolError."""
    begin = 0
    while begin < data.nbytes:
        body = begin + 2 * _LENGTH_BYTES
        head_bytes, body_bytes = (
            int.from_bytes(data[at : at + _LENGTH_BYTES], "little") for at in (begin, begin + _LENGTH_BYTES)
        )
        begin = body + head_bytes + body_bytes
        if begin > data.nbytes:
            raise ProtocolError("the copy of a shard is incomplete")
        head = _HEAD.decode(bytes(data[body : body + head_bytes]))
        yield _Message(head, data[body + head_bytes : begin])


class ShardCopies:
    """The shards that one process has: its own, and copies for others."""

    def __init__(self) -> None:
        self.shard = -1  # the own one
        self.own: ShardContent | None = None  # in the memory of the last commit
        self._previous: ShardContent | None = None  # between `keep_previous` and `accept`
        self._held: dict[int, ShardContent] = {}
        self._pending: dict[int, _Message] = {}
        self._digests = _Digests()

    # A commit

    def keep_previous(self) -> None:
        """Copy the own shard of the last commit: its memory is about to change."""
        self._previous = None if self.own is None else self.own.copied()

    def begin(self, shard: int, content: ShardContent) -> list[bytes | memoryview]:
        """Note the own shard of a new commit. Return the buffers of the message for its holder."""
        base = -1 if self.own is None or shard != self.shard else self.own.commit
        self.shard, self.own = shard, content
        changed = self._digests.changed_pieces(content, base)
        if changed is None:
            return message_with(shard, content)
        pieces = list(content.pieces())
        sizes = tuple(buffer.nbytes for buffer in content.buffers)
        head = _MessageHead(shard, content.commit, base, content.text, sizes, changed)
        return _framed(head, [pieces[number] for number in changed])

    def receive(self, messages: Iterable[_Message]) -> None:
        """Keep copies of the new commit aside. Raises ProtocolError if one does not fit the copy that is here."""
        for message in messages:
            head = message.head
            held = self._held.get(head.shard)
            if head.base >= 0 and (held is None or held.commit != head.base):
                raise ProtocolError(
                    f"a change of shard {head.shard} since commit {head.base}, which is not here"
                )
            self._pending[head.shard] = message

    def accept(self) -> None:
        """Forget the commit before: all processes have the new one."""
        for shard, message in self._pending.items():
            self._held[shard] = _applied(message, self._held.get(shard))
        self._pending, self._previous = {}, None
        self._digests.accept()

    def go_to(self, commit: int) -> ShardContent | None:
        """After a loss, go to the commit on which all processes agree: the last one, or the one before.

        Return the own shard of the one before; None if the last one stays, or if there was none before.
        """
        if self.own is None or self.own.commit <= commit:
            self._pending = {n: each for n, each in self._pending.items() if each.head.commit == commit}
            self.accept()
            return None
        self.own, self._previous, self._pending = self._previous, None, {}
        self._digests.discard()
        return self.own

    # A change of the ranks

    def inventory(self) -> dict[int, int]:
        """Return the shards that are here, and of which commit."""
        found = {shard: content.commit for shard, content in self._held.items()}
        if self.own is not None:
            found[self.shard] = max(self.own.commit, found.get(self.shard, -1))
        return found

    def known(self, commit: int) -> dict[int, ShardContent]:
        """Return the shards of a commit that are here, also of the one before the last while both are kept."""
        found = {shard: content for shard, content in self._held.items() if content.commit == commit}
        for content in (self._previous, self.own):
            if content is not None and content.commit == commit:
                found[self.shard] = content
        return found

    def content(self, shard: int, commit: int) -> ShardContent:
        """Return a shard of the inventory."""
        if shard == self.shard and self.own is not None and self.own.commit == commit:
            return self.own
        return self._held[shard]

    def hold(self, messages: Iterable[_Message]) -> None:
        """Keep the shards that have come in moves."""
        for message in messages:
            self._held[message.head.shard] = _applied(message, None)

    def become(self, shard: int) -> None:
        """Note which of the copies is the own shard from now on. The old one is kept as a copy."""
        if shard != self.shard:
            if self.own is not None:
                self._held[self.shard] = self.own.copied()
            self.shard, self.own = shard, self._held[shard]
            self._digests = _Digests()

    def detach_own(self) -> None:
        """Copy the own shard: its memory is about to change, and others may still need it."""
        if self.own is not None:
            self.own = self.own.copied()

    def prune(self, kept: Iterable[int]) -> None:
        """Drop all copies but these: every process has what it needs."""
        self._held = {shard: self._held[shard] for shard in kept}


def _applied(message: _Message, held: ShardContent | None) -> ShardContent:
    """Return the copy that a message makes of the one that is here, whose memory it uses."""
    head, body = message
    if head.base < 0:
        return ShardContent(head.commit, head.text, (body,))
    assert held is not None
    pieces = list(_pieces_of(held.buffers[0], head.sizes))
    for number in head.pieces:
        size = pieces[number].nbytes
        pieces[number][:], body = body[:size], body[size:]
    return ShardContent(head.commit, head.text, held.buffers)


def _pieces_of(data: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    begin = 0
    for size in sizes:
        yield from ShardContent(0, "", (data[begin : begin + size],)).pieces()
        begin += size


class _Digests:
    """The checksums of the pieces that the holder has, if there are any."""

    def __init__(self) -> None:
        self._accepted: tuple[tuple[int, ...], list[bytes]] | None = None  # sizes of buffers, and digests
        self._new: tuple[tuple[int, ...], list[bytes]] | None = None
        self._pause = 0

    def changed_pieces(self, content: ShardContent, base: int) -> tuple[int, ...] | None:
        """Return the numbers of the pieces to send; None: the whole content. `base`: the last commit, -1: none."""
        self._new = None
        if self._pause:
            self._pause -= 1
            return None
        sizes = tuple(buffer.nbytes for buffer in content.buffers)
        digests = [
            hashlib.sha256(piece).digest() for piece in content.pieces()
        ]  # processors have instructions for it
        self._new = sizes, digests
        if base < 0 or self._accepted is None or self._accepted[0] != sizes:
            return None
        changed = tuple(n for n, (old, new) in enumerate(zip(self._accepted[1], digests)) if old != new)
        if 2 * len(changed) > len(digests):
            self._pause, self._new = _PAUSE, None
            return None
        return changed

    def accept(self) -> None:
        """Note that the holder has what was to be sent."""
        self._accepted = self._new

    def discard(self) -> None:
        """Note that the holder keeps what it had before."""
        self._new = self._accepted
