"""Python objects between ranks: pickled, and carried by the engine like any other array of bytes.

The rules:
  1. Objects travel pickled, and only between processes that have proved that they know the job key. What pickle
     refuses, such as a lambda, goes by cloudpickle, whose pickles `pickle` reads.
  2. A header goes first: the length of the content, and whether there is a pickle. A rank whose object cannot be
     pickled sends the text of its error instead. It raises that error, and all other ranks raise RemoteError with the
     text, so that no rank waits for bytes that never come.
  3. The content follows, of a broadcast in pieces, so that the root needs memory for one piece only and its HMAC is
     computed while the others compute theirs. `engine/packed_objects` says what it consists of.
  4. A rank that has joined contributes no object and no header, so each header names the rank that it comes from. The
     HMAC covers that rank, and the ranks of an all-gather ascend: no object can stand in for another.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np

from ronde.comm.world import rank
from ronde.engine.operations import allgather_async, broadcast
from ronde.engine.packed_objects import (
    HEADER_BYTES,
    ObjectHeader,
    OutgoingObject,
    check_tag,
    new_tag,
    unpack_object,
    update_tag,
)
from ronde.engine.process_sets import ProcessSet
from ronde.errors import AuthenticationError

__all__ = ["allgather_object", "broadcast_object"]

ObjectT = TypeVar("ObjectT")

_PIECE_BYTES = 16 << 20


def broadcast_object(
    obj: ObjectT | None, root: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> ObjectT:
    """Return the object of rank `root` on every rank: on `root` the object itself, elsewhere a copy.

        config = ronde.broadcast_object(load_config() if ronde.rank() == 0 else None)

    All ranks of `process_set` (None: all ranks) call it, from any thread.

    Args:
        obj: any object that pickle or cloudpickle can copy; ranks other than `root` may pass None.
        root: a rank of the world, also with a process set.
        name: what the ranks call this broadcast; calls with one name may not overlap in time ("broadcast_object").
        process_set: the ranks that take part.

    Raises:
        RemoteError: `root` could not pickle its object; `traceback_text` says why. `root` raises the original error.
        AuthenticationError: the object was altered in transit.
        PeerLostError: a rank is gone.
        UsageError: `root` is not a rank, or this process is not in the set.
    """
    name = name or "broadcast_object"
    if rank() == root:
        outgoing = OutgoingObject(obj, name, root)
        broadcast(outgoing.header.packed(name), root, f"{name}.header", process_set=process_set)
        _send(outgoing, name, process_set)
        if outgoing.error is not None:
            raise outgoing.error
        return cast(ObjectT, obj)
    told = broadcast(np.zeros(HEADER_BYTES, np.uint8), root, f"{name}.header", process_set=process_set)
    return cast(ObjectT, _receive(ObjectHeader.read(told, name)._replace(source=root), name, process_set))


def allgather_object(
    obj: ObjectT, name: str | None = None, process_set: ProcessSet | None = None
) -> list[ObjectT]:
    """Return the objects of all ranks as a list in the order of ranks, copied by pickle.

        losses = ronde.allgather_object({"rank": ronde.rank(), "loss": loss})

    All ranks of `process_set` (None: all ranks) call it, from any thread.

    Args:
        obj: any object that pickle or cloudpickle can copy, of any size; it may differ between ranks.
        name: what the ranks call this operation; calls with one name may not overlap in time ("allgather_object").
        process_set: the ranks that take part.

    Raises:
        RemoteError: another rank could not pickle its object; `rank` and `traceback_text` say which and why. That rank
            raises the original error.
        AuthenticationError: an object was altered in transit.
        PeerLostError: a rank is gone.
        UsageError: this process is not in the set.
    """
    name = name or "allgather_object"
    outgoing = OutgoingObject(obj, name, rank())
    mine = np.empty(outgoing.header.content_length, np.uint8)
    outgoing.fill(mine)
    sent = [
        allgather_async(outgoing.header.packed(name)[np.newaxis], f"{name}.header", process_set),
        allgather_async(mine, f"{name}.content", process_set),
    ]
    rows, contents = (handle.wait() for handle in sent)
    if outgoing.error is not None:
        raise outgoing.error
    headers = [ObjectHeader.read(row, name) for row in rows]
    sources = [header.source for header in headers]
    if sources != sorted(set(sources)):
        raise AuthenticationError(
            f"the objects '{name}' arrive as those of ranks {sources}, which do not ascend"
        )
    objects, begin = [], 0
    for header in headers:
        # A copy, so that buffers are aligned, and one object does not keep the memory of all.
        content = contents[begin : begin + header.content_length].copy()
        begin += header.content_length
        objects.append(_checked(header, content, name))
    return objects


def _send(outgoing: OutgoingObject, name: str, process_set: ProcessSet | None) -> None:
    """Broadcast the content of this rank's object."""
    length, root = outgoing.header.content_length, outgoing.header.source
    memory = np.empty(min(length, _PIECE_BYTES), np.uint8)
    for begin in range(0, length, _PIECE_BYTES):
        piece = memory[: length - begin]
        outgoing.fill(piece)
        broadcast(piece, root, _name_of(piece, name), out=piece, process_set=process_set)


def _receive(header: ObjectHeader, name: str, process_set: ProcessSet | None) -> Any:
    """Return the root's object."""
    content = np.empty(header.content_length, np.uint8)
    tag = new_tag(header, name)
    for begin in range(0, content.size, _PIECE_BYTES):
        piece = content[begin : begin + _PIECE_BYTES]
        broadcast(piece, header.source, _name_of(piece, name), out=piece, process_set=process_set)
        update_tag(tag, piece[: max(0, header.length - begin)])
    check_tag(tag, content, header, name)
    return unpack_object(header, content)


def _name_of(piece: np.ndarray[Any, Any], name: str) -> str:
    """Whole pieces have a name of their own, so that all but the first need no negotiation."""
    return f"{name}.piece" if piece.size == _PIECE_BYTES else f"{name}.content"


def _checked(header: ObjectHeader, content: np.ndarray[Any, Any], name: str) -> Any:
    tag = new_tag(header, name)
    update_tag(tag, content[: header.length])
    check_tag(tag, content, header, name)
    return unpack_object(header, content)
