"""Python objects as bytes that travel between ranks, and back.

    content = pickle | table of the buffers | buffers, each aligned | HMAC

The rules:
  1. Large buffers, such as the memory of NumPy arrays, lie beside the pickle (protocol 5). The sender copies them once,
     into the memory that travels, and the objects of the receiver lie in the memory that has arrived.
  2. A pickle can run any program, and tensors may travel without tags or through a library that has none. So the
     content ends with an HMAC under the job key, and a rank checks it before it unpickles or shows the bytes. It covers
     the header, too, which names the rank that the object comes from. The header has another one, which a rank checks
     before it allocates what the header says.
"""

from __future__ import annotations

import hmac
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ronde.comm.world import meeting
from ronde.errors import AuthenticationError, RemoteError
from ronde.process.exceptions import exception_text

__all__ = [
    "HEADER_BYTES",
    "ObjectHeader",
    "OutgoingObject",
    "check_tag",
    "new_tag",
    "unpack_object",
    "update_tag",
]

Bytes = NDArray[np.uint8]

TAG_BYTES = 32
_ALIGNMENT_BYTES = 64
_LARGE_BYTES = 1 << 16  # a smaller buffer stays in the pickle
_HEADER = struct.Struct("<QQIQ?")
_ENTRY = struct.Struct("<Q?")
HEADER_BYTES = _HEADER.size + TAG_BYTES


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
            return bytes(TAG_BYTES)
        return met.key.begin_hmac(b"object header", name.encode(), _HEADER.pack(*self)).digest()

    @property
    def content_length(self) -> int:
        """The length of the content with the HMAC."""
        return self.length + TAG_BYTES


class OutgoingObject:
    """An object on its way to other ranks; `error` is the reason why it cannot be pickled, if any.

    `fill` copies its content, piece by piece.
    """

    def __init__(self, obj: Any, name: str, source: int) -> None:
        self.error: Exception | None = None
        buffers: list[memoryview] = []
        try:
            chunks = _pickled(obj, buffers)
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
        self._tag = new_tag(self.header, name)
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
        update_tag(self._tag, content)
        if rest.size:
            if self._last is None:
                self._last = bytes(TAG_BYTES) if self._tag is None else self._tag.digest()
            rest[:] = np.frombuffer(self._last[: rest.size], np.uint8)
            self._last = self._last[rest.size :]


def new_tag(header: ObjectHeader, name: str) -> hmac.HMAC | None:
    """Return an HMAC to be updated with the content. A process that is alone has no job key, and needs none."""
    met = meeting()
    return None if met is None else met.key.begin_hmac(b"object", name.encode(), _HEADER.pack(*header))


def update_tag(tag: hmac.HMAC | None, content: NDArray[Any]) -> None:
    """Let the HMAC cover these bytes, too."""
    if tag is not None:
        tag.update(cast(Any, content))


def check_tag(tag: hmac.HMAC | None, content: Bytes, header: ObjectHeader, name: str) -> None:
    """Raise AuthenticationError unless the content ends with the HMAC. `tag`: updated with what precedes that."""
    if tag is not None and not hmac.compare_digest(tag.digest(), content[header.length :].tobytes()):
        raise AuthenticationError(
            f"the object '{name}' of rank {header.source} was altered in transit, so Ronde does not unpickle it "
            "(docs/security.md says how to protect all payload)"
        )


def unpack_object(header: ObjectHeader, content: Bytes) -> Any:
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


class _Chunks(list[memoryview]):
    """A file that keeps what is written; the pickler writes large bytes objects as they are."""

    def write(self, data: Any) -> int:
        self.append(memoryview(data).cast("B"))
        return self[-1].nbytes


def _pickled(obj: Any, buffers: list[memoryview]) -> list[memoryview]:
    """Return the pickle in pieces. `buffers` receives the large buffers, which are not in it.

    What pickle refuses, such as lambdas and local classes, goes by cloudpickle.
    """
    try:
        return _pickled_by(pickle.Pickler, obj, buffers)
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
            return _pickled_by(cloudpickle.CloudPickler, obj, buffers)
        except Exception as failure:
            raise failure from None


def _pickled_by(pickler: Callable[..., Any], obj: Any, buffers: list[memoryview]) -> list[memoryview]:

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE_BYTES:
            buffers.append(raw)
        return raw.nbytes < _LARGE_BYTES

    chunks = _Chunks()
    pickler(chunks, pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(obj)
    return chunks


def _bytes_in(chunks: Sequence[memoryview]) -> int:
    return sum(chunk.nbytes for chunk in chunks)
