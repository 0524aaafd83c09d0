"""New processes get the state of a commit: small ones from one rank, large ones from all ranks that have it.

1. The first rank that has the state, the *root*, broadcasts it pickled. Large buffers, such as the memory of arrays
   and tensors, lie beside the pickle (protocol 5); if there are any, only their sizes and checksums travel with it.
2. If the ranks that have the state are on several hosts, those whose large buffers have the same sizes and checksums
   are *servers*. Ranks that differ, because their states hold values of this rank only, serve nothing: a new process
   gets the state of one rank, not a mixture. On one host the root is the only server.
3. A new process gets an equal share of the bytes from each server; if there are servers on its host, only from these
   (`plan_shares`). If more processes are new than have the state, the root broadcasts the bytes instead, so that new
   processes pass on what they have.
4. Large buffers travel in rounds. Beside the state a new process needs 16 MiB for each server, a server 16 MiB, and
   another rank nothing (in a broadcast 16 MiB).
5. A new process unpickles only when the buffers have the checksums that the root has announced, under its HMAC
   (`engine/objects`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.comm import world as comm
from ronde.elastic.batches import share_of
from ronde.engine.objects import broadcast_object, pickled
from ronde.errors import AuthenticationError

if TYPE_CHECKING:
    from ronde.comm.communicator import Communicator

__all__ = ["LARGE_BYTES", "plan_shares", "transfer"]

LARGE_BYTES = 1 << 20  # a smaller buffer goes with the pickle
ROUND_BYTES = 16 << 20  # of each server, for all new processes; also the size of a block of the checksums
_NAME = "ronde.elastic.state"

Bytes = NDArray[np.uint8]


class _Announcement(NamedTuple):
    """What the root broadcasts. `whole`: the state if it has no large buffers, else `pickled` without `sizes`.

    `sizes`, `digests`: of the large buffers; `digests` has one for each block.
    """

    whole: object
    pickled: bytes = b""
    sizes: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()


def transfer(payload: object, senders: Sequence[int], receivers: Sequence[int]) -> Any:
    """Return the payload of `senders` on all `receivers`, and None elsewhere. All ranks of the world call it.

    Args:
        payload: what pickle or cloudpickle can copy; of receivers it has no effect.
        senders: ranks whose payloads are the same; at least one.
        receivers: other ranks.

    Raises:
        AuthenticationError: a payload was altered in transit.
        RemoteError: the first sender could not pickle its payload; the sender raises the original error.
        PeerError: a rank was lost.
    """
    world, root = comm.world(), senders[0]
    hosts = hosts_of(world)
    are_many = len(senders) >= len(receivers) and len({hosts[each] for each in senders}) > 1
    may_serve = world.rank == root or (are_many and world.rank in senders)
    mine, buffers = _announcement_of(payload) if may_serve else (_Announcement(None), [])
    theirs: _Announcement = broadcast_object(mine if world.rank == root else None, root, _NAME)
    is_new = world.rank in receivers
    if not theirs.sizes:
        return theirs.whole if is_new else None
    if is_new:
        buffers = [np.empty(size, np.uint8) for size in theirs.sizes]
    servers = [root]
    if are_many:
        serves = may_serve and (mine.sizes, mine.digests) == (theirs.sizes, theirs.digests)
        told = world.allgather(np.array([serves], np.int64))
        servers = [each for each in range(world.size) if told[each]]
    if len(senders) < len(receivers):
        _broadcast(buffers, theirs.sizes, root)
    else:
        _exchange(buffers, {each: plan_shares(each, servers, hosts, sum(theirs.sizes)) for each in receivers})
    if not is_new:
        return None
    if _digests_of(buffers) != theirs.digests:
        raise AuthenticationError(
            f"the state from the ranks {', '.join(map(str, servers))} was altered in transit, so Ronde does not "
            "unpickle it (docs/security.md says how to protect all payload)"
        )
    return pickle.loads(theirs.pickled, buffers=buffers)


def hosts_of(world: Communicator) -> Sequence[int]:
    """Return the number of each rank's host."""
    return world.topology.host_of


def plan_shares(
    receiver: int, servers: Sequence[int], hosts: Sequence[object], num_bytes: int
) -> dict[int, slice]:
    """Return which of `num_bytes` bytes each server sends to a receiver. `hosts`: by rank, the number of its host."""
    near = [rank for rank in servers if hosts[rank] == hosts[receiver]] or servers
    return {rank: share_of(num_bytes, index, len(near)) for index, rank in enumerate(near)}


def _announcement_of(payload: object) -> tuple[_Announcement, list[Bytes]]:
    """Return what a root announces, and the large buffers."""
    views: list[memoryview] = []
    try:
        pieces = pickled(payload, views, LARGE_BYTES)
    except Exception:  # the broadcast of the payload raises it, on all ranks
        return _Announcement(payload), []
    if not views:
        return _Announcement(payload), []
    buffers = [np.frombuffer(each, np.uint8) for each in views]
    sizes = tuple(each.size for each in buffers)
    return _Announcement(None, b"".join(pieces), sizes, _digests_of(buffers)), buffers


def _broadcast(buffers: Sequence[Bytes], sizes: Sequence[int], root: int) -> None:
    """Send the buffers from the root to the ranks that have buffers of these sizes. All ranks call it."""
    world = comm.world()
    is_root = world.rank == root
    memory = np.empty(min(ROUND_BYTES, max(sizes)) if is_root or not buffers else 0, np.uint8)
    for index, size in enumerate(sizes):
        for begin in range(0, size, ROUND_BYTES):
            part = slice(begin, min(begin + ROUND_BYTES, size))
            piece = memory[: _size_of(part)] if memory.size else buffers[index][part]
            if is_root:
                piece[:] = buffers[index][part]
            world.broadcast(piece, root, out=piece)


def _exchange(buffers: Sequence[Bytes], plan: Mapping[int, Mapping[int, slice]]) -> None:
    """Send the shares of these buffers that this rank serves, or receive all shares into them. All ranks call it."""
    world = comm.world()
    piece = max(1, ROUND_BYTES // len(plan))
    longest = max(share.stop - share.start for shares in plan.values() for share in shares.values())
    nothing = slice(0, 0)
    outgoing_shares = [plan.get(target, {}).get(world.rank, nothing) for target in range(world.size)]
    incoming_shares = [plan.get(world.rank, {}).get(source, nothing) for source in range(world.size)]
    sent, received = (
        np.empty(sum(_size_of(_part(share, 0, piece)) for share in shares), np.uint8)
        for shares in (outgoing_shares, incoming_shares)
    )
    for begin in range(0, longest, piece):
        outgoing = [_part(share, begin, piece) for share in outgoing_shares]
        incoming = [_part(share, begin, piece) for share in incoming_shares]
        splits = [_size_of(part) for part in outgoing]
        _copy(buffers, outgoing, sent, is_reading=True)
        arrived = received[: sum(_size_of(part) for part in incoming)]
        world.alltoall(sent[: sum(splits)], splits, out=arrived)
        _copy(buffers, incoming, arrived, is_reading=False)


def _size_of(part: slice[int, int, None]) -> int:
    return part.stop - part.start


def _part(share: slice, begin: int, size: int) -> slice:
    """Return `size` bytes of a share, or what is left, from its byte `begin` on."""
    start = min(share.start + begin, share.stop)
    return slice(start, min(start + size, share.stop))


def _copy(buffers: Sequence[Bytes], parts: Sequence[slice], flat: Bytes, is_reading: bool) -> None:
    """Copy parts of the concatenated buffers to `flat`, one after the other, or from there."""
    done = 0
    for part in parts:
        start = 0
        for buffer in buffers if part.stop > part.start else ():
            first, last = max(part.start, start), min(part.stop, start + buffer.size)
            if first < last:
                there = flat[done : done + last - first]
                here = buffer[first - start : last - start]
                if is_reading:
                    there[:] = here
                else:
                    here[:] = there
                done += last - first
            start += buffer.size


def _digests_of(buffers: Sequence[Bytes]) -> tuple[bytes, ...]:
    """Return the checksum of each block of the buffers, computed by as many threads as there are cores."""
    blocks = [
        buffer[at : at + ROUND_BYTES] for buffer in buffers for at in range(0, buffer.size, ROUND_BYTES)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return tuple(threads.map(lambda block: hashlib.sha256(block.data).digest(), blocks))
