"""Python objects between ranks: pickled, and carried by the engine like any other array of bytes.

The rules:
  1. Objects travel pickled, and only between processes that have proved that they know the job key. What pickle
     refuses, such as a lambda, goes by cloudpickle, whose pickles `pickle` reads.
  2. A header goes first: the length of the content, and whether there is a pickle. A rank whose object cannot be
     pickled sends the text of its error instead. It raises that error, and all other ranks raise RemoteError with the
     text, so that no rank waits for bytes that never come.
  3. The content follows, of a broadcast in pieces, so that the root needs memory for one piece only and its HMAC is
     computed while the others compute theirs:

         content = pickle | table of the buffers | buffers, each aligned | HMAC

     Large buffers, such as the memory of NumPy arrays, lie beside the pickle (protocol 5). The sender copies them once,
     into the memory that travels, and the objects of the receiver lie in the memory that has arrived.
  4. A pickle can run any program, and tensors may travel without tags or through a library that has none. So the
     content ends with an HMAC under the job key, and a rank checks it before it unpickles or shows the bytes. The
     header has another one, which a rank checks before it allocates what the header says.
  5. A rank that has joined contributes no object and no header, so each header names the rank that it comes from. The
     HMAC covers the header, and the ranks of an all-gather ascend: no object can stand in for another.
"""

from __future__ import annotations

import hmac
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ronde.comm.world import meeting, rank
from ronde.engine.operations import allgather_async, broadcast
from ronde.engine.process import ProcessSet
from ronde.errors import AuthenticationError, RemoteError
from ronde.process.exceptions import exception_text

__all__ = ["OutgoingObject", "allgather_object", "broadcast_object", "pickled"]

ObjectT = TypeVar("ObjectT")
Bytes = NDArray[np.uint8]

_PIECE_BYTES = 16 << 20
_TAG_BYTES = 32
_ALIGNMENT_BYTES = 64
_LARGE_BYTES = 1 << 16  # a smaller buffer stays in the pickle
_HEADER = struct.Struct("<QQIQ?")
_ENTRY = struct.Struct("<Q?")
_HEADER_BYTES = _HEADER.size + _TAG_BYTES


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
    row = broadcast(np.zeros(_HEADER_BYTES, np.uint8), root, f"{name}.header", process_set=process_set)
    return cast(ObjectT, _receive(ObjectHeader.read(row, name)._replace(source=root), name, process_set))


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
    tag = _ContentTag(header, name)
    for begin in range(0, content.size, _PIECE_BYTES):
        piece = content[begin : begin + _PIECE_BYTES]
        broadcast(piece, header.source, _name_of(piece, name), out=piece, process_set=process_set)
        tag.update(piece[: max(0, header.length - begin)])
    tag.check(content)
    return _unpack_object(header, content)


def _name_of(piece: np.ndarray[Any, Any], name: str) -> str:
    """Whole pieces have a separate name, so that all but the first need no negotiation."""
    return f"{name}.piece" if piece.size == _PIECE_BYTES else f"{name}.content"


def _checked(header: ObjectHeader, content: np.ndarray[Any, Any], name: str) -> Any:
    tag = _ContentTag(header, name)
    tag.update(content[: header.length])
    tag.check(content)
    return _unpack_object(header, content)


# Objects as bytes: the header, the content, and its HMAC


class ObjectHeader(NamedTuple):
    """What a rank has to know before the content arrives.

    `length`: of the content without the HMAC; `pickle_length`: of the pickle in it, which `buffers` buffers follow;
    `source`: the rank; `is_error`: the pickle is the text of an error.
    """

    length: int
    pickle_length: int
    buffers: int
    source: int
    is_error: bool

    @classmethod
    def read(cls, row: Bytes, name: str) -> ObjectHeader:
        """Return what `packed` has packed under the same name. Raises AuthenticationError for anything else."""
        packed = row.tobytes()
        header = cls(*_HEADER.unpack(packed[: _HEADER.size]))
        if not hmac.compare_digest(packed[_HEADER.size :], header._tag(name)):
            raise AuthenticationError(f"the header of the object '{name}' was altered in transit")
        return header

    def packed(self, name: str) -> Bytes:
        return np.frombuffer(_HEADER.pack(*self) + self._tag(name), np.uint8)

    def _tag(self, name: str) -> bytes:
        met = meeting()
        if met is None:
            return bytes(_TAG_BYTES)
        return met.key.begin_hmac(b"object header", name.encode(), _HEADER.pack(*self)).digest()

    @property
    def content_length(self) -> int:
        """The length of the content with the HMAC."""
        return self.length + _TAG_BYTES


class OutgoingObject:
    """An object on its way to other ranks; `error` is the reason why it cannot be pickled, if any.

    `fill` copies its content, piece by piece.
    """

    def __init__(self, obj: Any, name: str, source: int) -> None:
        self.error: Exception | None = None
        buffers: list[memoryview] = []
        try:
            chunks = pickled(obj, buffers)
        except Exception as failure:  # pickling runs the object's own code, which may raise anything
            self.error = failure
            text = exception_text(failure).encode(errors="replace")
            chunks, buffers = [memoryview(text)], []
        pickle_length = _bytes_in(chunks)
        chunks.append(memoryview(b"".join(_ENTRY.pack(buffer.nbytes, buffer.readonly) for buffer in buffers)))
        length = _bytes_in(chunks)
        for buffer in buffers:
            padding = -length % _ALIGNMENT_BYTES
            chunks += [memoryview(bytes(padding)), buffer]
            length += padding + buffer.nbytes
        self.header = ObjectHeader(length, pickle_length, len(buffers), source, self.error is not None)
        self._chunks = chunks[::-1]
        self._left = length
        self._tag = _ContentTag(self.header, name)
        self._last: bytes | None = None

    def fill(self, place: Bytes) -> None:
        """Copy the next bytes of the content."""
        content, rest = np.split(place, [min(place.size, self._left)])
        self._left -= content.size
        done = 0
        while done < content.size:
            chunk = self._chunks.pop()
            part, later = chunk[: content.size - done], chunk[content.size - done :]
            content[done : done + part.nbytes] = np.frombuffer(part, np.uint8)
            done += part.nbytes
            if later.nbytes:
                self._chunks.append(later)
        self._tag.update(content)
        if rest.size:
            if self._last is None:
                self._last = self._tag.digest()
            rest[:] = np.frombuffer(self._last[: rest.size], np.uint8)
            self._last = self._last[rest.size :]


class _ContentTag:
    """The HMAC of a content, under the job key. A process that is alone has no job key, and needs none."""

    def __init__(self, header: ObjectHeader, name: str) -> None:
        met = meeting()
        self._header, self._name = header, name
        self._hmac = (
            None if met is None else met.key.begin_hmac(b"object", name.encode(), _HEADER.pack(*header))
        )

    def update(self, content: NDArray[Any]) -> None:
        """Let the HMAC cover these bytes, too."""
        if self._hmac is not None:
            self._hmac.update(cast(Any, content))

    def digest(self) -> bytes:
        return bytes(_TAG_BYTES) if self._hmac is None else self._hmac.digest()

    def check(self, content: Bytes) -> None:
        """Raise AuthenticationError unless the content ends with the HMAC, which covers what precedes it."""
        length = self._header.length
        if self._hmac is not None and not hmac.compare_digest(self.digest(), content[length:].tobytes()):
            raise AuthenticationError(
                f"the object '{self._name}' of rank {self._header.source} was altered in transit, so Ronde does not "
                "unpickle it (docs/security.md says how to protect all payload)"
            )


def _unpack_object(header: ObjectHeader, content: Bytes) -> Any:
    """Return the object of a content whose HMAC is right. Raises RemoteError if it could not be pickled."""
    memory = memoryview(cast(Any, content))
    end = header.pickle_length
    if header.is_error:
        text = memory[:end].tobytes().decode()
        last_line = text.strip().rsplit("\n", 1)[-1]
        raise RemoteError(f"rank {header.source} cannot pickle its object: {last_line}", header.source, text)
    place = end + header.buffers * _ENTRY.size
    buffers = []
    for length, is_read_only in _ENTRY.iter_unpack(memory[end:place]):
        place += -place % _ALIGNMENT_BYTES
        buffer = memory[place : place + length]
        buffers.append(buffer.toreadonly() if is_read_only else buffer)
        place += length
    return pickle.loads(memory[:end], buffers=buffers)


# Pickles, with large buffers beside them


class _Chunks(list[memoryview]):
    """A file that keeps what is written; the pickler writes large bytes objects as they are."""

    def write(self, data: Any) -> int:
        self.append(memoryview(data).cast("B"))
        return self[-1].nbytes


def pickled(obj: Any, buffers: list[memoryview], large_bytes: int = _LARGE_BYTES) -> list[memoryview]:
    """Return the pickle in pieces. `buffers` receives those of `large_bytes` or more, which are not in it.

    What pickle refuses, such as lambdas and local classes, goes by cloudpickle. Raises what the object's code raises.
    """
    try:
        return _pickled_by(pickle.Pickler, obj, buffers, large_bytes)
    except Exception as error:
        buffers.clear()
        try:
            import cloudpickle
        except ImportError:
            if not isinstance(error, (AttributeError, pickle.PicklingError)):  # a file or a lock
                raise error from None
            raise pickle.PicklingError(
                f"{error}; with cloudpickle installed (pip install cloudpickle) lambdas, local functions and local "
                "classes can be sent"
            ) from error
        try:
            return _pickled_by(cloudpickle.CloudPickler, obj, buffers, large_bytes)
        except Exception as failure:
            raise failure from None


def _pickled_by(
    pickler: Callable[..., Any], obj: Any, buffers: list[memoryview], large_bytes: int
) -> list[memoryview]:

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= large_bytes:
            buffers.append(raw)
        return raw.nbytes < large_bytes

    chunks = _Chunks()
    pickler(chunks, pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(obj)
    return chunks


def _bytes_in(chunks: Sequence[memoryview]) -> int:
    return sum(chunk.nbytes for chunk in chunks)
