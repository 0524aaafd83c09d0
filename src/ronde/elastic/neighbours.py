"""Sharded parts of a state survive the loss of a rank: at each commit another rank gets a copy of its shard.

`shard_copies` decides; this shell reads and loads the parts, and exchanges messages by all-to-all on the world.

The exchange is a part of the commit, and not a task of a thread: ranks keep no commit before the last one, so a copy
that arrives later than its commit would fit nothing that the other ranks can go back to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ronde.comm.byte_exchange import allgather_bytes
from ronde.elastic.payloads import pack, unpack
from ronde.elastic.shard_copies import (
    ShardContent,
    ShardCopies,
    holders,
    message_with,
    messages_in,
    plan_moves,
)
from ronde.elastic.state_parts import Part, ReshardablePart
from ronde.elastic.state_transfer import hosts_of
from ronde.errors import CollectiveError, UsageError
from ronde.typed_json import Natural, TypedJson

if TYPE_CHECKING:
    from ronde.comm.communicator import Communicator

__all__ = ["Neighbours", "ShardsLostError"]

_PARTS: TypedJson[tuple[tuple[str, str, Natural], ...]] = TypedJson(
    tuple[tuple[str, str, Natural], ...], "description of a shard"
)

Buffers = Sequence[bytes | memoryview]


class ShardsLostError(CollectiveError):
    """Ranks were lost together with the copies of their shards, so survivors cannot go on.

    Attributes:
        shards: The ranks, in the world that made the last commit.
    """

    def __init__(self, message: str, shards: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.shards = shards

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.shards)


class Neighbours:
    """The copies of shards in the memory of other ranks, for the sharded parts of one state. All ranks make one.

    The order of a commit is `secure`, a barrier, `accept`. After a change of the ranks all call `settle`. `parts`: the
    sharded parts, by name; the same names on all ranks.
    """

    def __init__(self) -> None:
        self._copies = ShardCopies()
        self._num_shards = 0  # the size of the world that has made the last commit; 0: there is none
        self._parts_differ = False  # from the own shard: a loss has interrupted `load_shards`

    def secure(self, commit: int, parts: Mapping[str, Part], world: Communicator) -> None:
        """Save the parts, and give a copy to the holder. All ranks call it. Until `accept`, the commit before stays.

        Args:
            commit: the number of the commit.
            parts: the sharded parts.
            world: the ranks that commit.

        Raises:
            PeerError: a rank was lost.
            UsageError: a part contains an object that cannot be pickled.
        """
        self._copies.keep_previous()
        for part in parts.values():
            part.save()
        message = self._copies.begin(world.rank, _content_of(commit, parts))
        self._copies.receive(messages_in(_exchange_with_holders(world, message)))

    def accept(self, size: int) -> None:
        """Forget the commit before, because all ranks, `size` in number, have secured the new one. Raises no error."""
        self._copies.accept()
        self._num_shards = size

    def settle(self, commit: int, parts: Mapping[str, Part], world: Communicator) -> None:
        """Bring each rank of a new world its shard, and each holder its copy. All ranks call it.

        If a further loss ends it, call it again in the next world, with the same commit.

        Args:
            commit: on which the ranks have agreed; each survivor has it or the one after it.
            parts: the sharded parts, which have the state of this commit afterwards, as the last copy and live.
            world: the new world.

        Raises:
            ShardsLostError: a shard and its copy are lost. It is raised on all ranks, and names the ranks.
            PeerError: a rank was lost.
            UsageError: the world has another size, and a part has no `load_shards`. Raised on all ranks.
        """
        if (previous := self._copies.go_to(commit)) is not None:
            _load(parts, previous)
        mine = [self._num_shards, *self._copies.inventory().items()]
        received = [json.loads(each) for each in allgather_bytes(world, json.dumps(mine).encode())]
        num_shards = max(num for num, *_ in received)
        inventories = [dict(pairs) for _, *pairs in received]
        plan = plan_moves(inventories, num_shards, commit, hosts_of(world))
        if plan.lost:
            raise ShardsLostError(
                f"at commit {commit} no process has the shards of these ranks: {', '.join(map(str, plan.lost))}; each "
                "was lost together with the rank that kept the copy of its shard",
                plan.lost,
            )
        if num_shards != world.size:
            _require_reshardable(parts, num_shards, world.size)
        outgoing: dict[int, list[bytes | memoryview]] = {}
        for move in plan.moves:
            if move.source == world.rank:
                content = self._copies.content(move.shard, commit)
                outgoing.setdefault(move.target, []).extend(message_with(move.shard, content))
        self._copies.hold(messages_in(_exchange(world, outgoing)))
        if num_shards == world.size:
            self._take_shard(parts, world)
        else:
            self._reshard(commit, parts, num_shards, world)
        self._num_shards = world.size

    def adopt(self, commit: int, parts: Mapping[str, Part], world: Communicator) -> None:
        """Take the last copies of the parts as the state of a commit, and give them to holders. All ranks call it.

        The copies of earlier commits are dropped. Raises PeerError.
        """
        fresh = ShardCopies()
        message = fresh.begin(world.rank, _content_of(commit, parts))
        fresh.receive(messages_in(_exchange_with_holders(world, message)))
        world.barrier()
        fresh.accept()
        self._copies, self._num_shards, self._parts_differ = fresh, world.size, False

    def known_shards(self, commit: int) -> dict[int, dict[str, object]]:
        """Return the payloads of all shards of a commit that are here, by rank and part. Raises no error."""
        return {shard: _payloads_in(content) for shard, content in self._copies.known(commit).items()}

    def _take_shard(self, parts: Mapping[str, Part], world: Communicator) -> None:
        if self._copies.shard != world.rank or self._parts_differ:
            self._copies.become(world.rank)
            assert self._copies.own is not None
            _load(parts, self._copies.own)
            self._parts_differ = False
        world.barrier()  # from here on nobody needs what this rank has besides
        after = holders(hosts_of(world))
        self._copies.prune(shard for shard, holder in enumerate(after) if holder == world.rank)

    def _reshard(self, commit: int, parts: Mapping[str, Part], num_shards: int, world: Communicator) -> None:
        found = [_payloads_in(self._copies.content(shard, commit)) for shard in range(num_shards)]
        self._copies.detach_own()
        self._parts_differ = True
        for name, part in parts.items():
            assert isinstance(part, ReshardablePart)
            part.load_shards([each[name] for each in found])
        self.adopt(commit, parts, world)


def _exchange_with_holders(world: Communicator, message: Buffers) -> memoryview:
    holder = holders(hosts_of(world))[world.rank]
    return _exchange(world, {holder: message} if holder >= 0 else {})


def _exchange(world: Communicator, messages: Mapping[int, Buffers]) -> memoryview:
    """Send each rank its message; return what has arrived for this one, in memory that can be written."""
    splits = [sum(len(memoryview(each)) for each in messages.get(rank, ())) for rank in range(world.size)]
    outgoing = np.empty(sum(splits), np.uint8)
    begin = 0
    for rank in range(world.size):
        for each in messages.get(rank, ()):
            outgoing[begin : begin + len(each)] = np.frombuffer(each, np.uint8)
            begin += len(each)
    received: np.ndarray[Any, Any] = world.alltoall(outgoing, splits) if world.size > 1 else outgoing
    return received.data


def _content_of(commit: int, parts: Mapping[str, Part]) -> ShardContent:
    packed = {name: pack(part.payload()) for name, part in parts.items()}
    text = _PARTS.encode(tuple((name, each.text, each.num_bytes) for name, each in packed.items())).decode()
    return ShardContent(commit, text, tuple(buffer for each in packed.values() for buffer in each.buffers))


def _payloads_in(content: ShardContent) -> dict[str, object]:
    data = content.buffers[0] if len(content.buffers) == 1 else memoryview(b"".join(content.buffers))
    payloads, begin = {}, 0
    for name, text, num_bytes in _PARTS.decode(content.text.encode()):
        # The ranks of a job trust each other, also with pickles.
        payloads[name] = unpack(text, data[begin : begin + num_bytes], takes_pickles=True)
        begin += num_bytes
    return payloads


def _load(parts: Mapping[str, Part], content: ShardContent) -> None:
    payloads = _payloads_in(content)
    for name, part in parts.items():
        part.load(payloads[name])


def _require_reshardable(parts: Mapping[str, Part], num_shards: int, size: int) -> None:
    for name, part in parts.items():
        if not isinstance(part, ReshardablePart):
            raise UsageError(
                f"the state has the shards of {num_shards} ranks, and the world has {size} now: let the job wait for "
                f"replacements (--min-np {num_shards}), or give the part {name!r} a method load_shards(payloads), "
                "which takes all shards"
            )
