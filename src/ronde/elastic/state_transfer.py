"""New processes get the state of a commit: small ones from one rank, large ones from all ranks that have it.

  1. The first rank that has the state, the *root*, broadcasts it pickled. Large buffers, such as the memory of arrays
     and tensors, lie beside the pickle (protocol 5); if there are any, only their sizes and checksums travel with it.
  2. A rank whose large buffers have the same sizes and checksums is a *server*. Ranks that differ, because their states
     hold values of this rank only, serve nothing: a new process gets the state of one rank, not a mixture.
  3. A new process gets an equal share of the bytes from each server; if there are servers on its host, only from these
     (`plan_shares`). The shares travel in rounds, so that beside the state a new process needs 16 MiB for each server.
  4. A new process unpickles only when the buffers have the checksums that the root has announced, under its HMAC
     (`engine/objects`).

The root broadcasts the whole state if all servers are on one host, or fewer than the new processes: a broadcast copies
less on one host, and with many new processes these pass on what they have.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
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
ROUND_BYTES = 16 << 20  # of each server, for all new processes
_NAME = "ronde.elastic.state"

Bytes = NDArray[np.uint8]


class _Announcement(NamedTuple):
    """What the root broadcasts. `whole`: the state if nothing is served by other ranks, else `pickled` without `sizes`.

    `sizes`, `digests`: of the large buffers.
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
    rank, root = comm.rank(), senders[0]
    hosts = hosts_of(comm.world())
    is_shared = len(senders) >= len(receivers) and len({hosts[each] for each in senders}) > 1
    mine = _announcement_of(payload) if is_shared and rank in senders else (_Announcement(payload), [])
    theirs: _Announcement = broadcast_object(mine[0] if rank == root else None, root, _NAME)
    if not theirs.sizes:
        return theirs.whole if rank in receivers else None
    serves = rank in senders and (mine[0].sizes, mine[0].digests) == (theirs.sizes, theirs.digests)
    told = comm.world().allgather(np.array([serves], np.int64))
    servers = [each for each in range(comm.size()) if told[each]]
    plan = {each: plan_shares(each, servers, hosts, sum(theirs.sizes)) for each in receivers}
    if rank not in receivers:
        _exchange([_flat(each) for each in mine[1]] if serves else [], plan)
        return None
    buffers = [np.empty(size, np.uint8) for size in theirs.sizes]
    _exchange(buffers, plan)
    if tuple(_digest_of(each.data) for each in buffers) != theirs.digests:
        raise AuthenticationError(
            f"the state from the ranks {', '.join(map(str, plan[rank]))} was altered in transit, so Ronde does not "
            "unpickle it (docs/security.md says how to protect all payload)"
        )
    return pickle.loads(theirs.pickled, buffers=buffers)


def hosts_of(world: Communicator) -> Sequence[object]:
    """Return the number of each rank's host."""
    return world.topology.host_of


def plan_shares(
    receiver: int, servers: Sequence[int], hosts: Sequence[object], num_bytes: int
) -> dict[int, slice]:
    """Return which of `num_bytes` bytes each server sends to a receiver. `hosts`: by rank, the number of its host."""
    near = [rank for rank in servers if hosts[rank] == hosts[receiver]] or servers
    return {rank: share_of(num_bytes, index, len(near)) for index, rank in enumerate(near)}


def _announcement_of(payload: object) -> tuple[_Announcement, list[memoryview]]:
    """Return what a root announces, and the large buffers."""
    buffers: list[memoryview] = []
    try:
        pieces = pickled(payload, buffers, LARGE_BYTES)
    except Exception:  # the broadcast of the payload raises it, on all ranks
        return _Announcement(payload), []
    if not buffers:
        return _Announcement(payload), []
    sizes = tuple(each.nbytes for each in buffers)
    digests = tuple(_digest_of(each) for each in buffers)
    return _Announcement(None, b"".join(pieces), sizes, digests), buffers


def _exchange(buffers: Sequence[Bytes], plan: Mapping[int, Mapping[int, slice]]) -> None:
    """Send the shares of these buffers that this rank serves, or receive all shares into them. All ranks call it."""
    world = comm.world()
    piece = max(1, ROUND_BYTES // len(plan))
    longest = max(share.stop - share.start for shares in plan.values() for share in shares.values())
    for begin in range(0, longest, piece):
        outgoing = [
            _part(plan.get(target, {}).get(world.rank, slice(0, 0)), begin, piece)
            for target in range(world.size)
        ]
        sent = np.empty(sum(part.stop - part.start for part in outgoing), np.uint8)
        _copy(buffers, outgoing, sent, is_reading=True)
        received = world.alltoall(sent, [part.stop - part.start for part in outgoing])
        mine = plan.get(world.rank, {})
        incoming = [_part(mine.get(source, slice(0, 0)), begin, piece) for source in range(world.size)]
        _copy(buffers, incoming, received, is_reading=False)


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


def _digest_of(buffer: memoryview) -> bytes:
    return hashlib.sha256(buffer).digest()


def _flat(buffer: memoryview) -> Bytes:
    return np.frombuffer(buffer, np.uint8)
