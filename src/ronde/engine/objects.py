"""Python objects between ranks: pickled, and carried by the engine like any other array of bytes.

The rules:
  1. Objects travel pickled, and only between processes that have proved that they know the job key.
  2. A header goes first: the length of the pickle, and whether there is one. A rank whose object cannot be pickled
     sends the text of its error instead. It raises that error, and all other ranks raise RemoteError with the text, so
     that no rank waits for bytes that never come.
  3. A pickle can run any program, and tensors may travel without tags or through a library that has none. So the
     header ends with an HMAC under the job key, and a rank checks it before it unpickles or shows the bytes.
  4. A rank that has joined contributes no object and no header, so each header names the rank that it comes from. The
     HMAC covers that rank, and the ranks of an all-gather ascend: no object can stand in for another.
"""

from __future__ import annotations

import hmac
import pickle
import struct
import traceback
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ronde.comm.queries import rank
from ronde.comm.world import meeting
from ronde.engine.operations import allgather_async, broadcast
from ronde.engine.process_sets import ProcessSet
from ronde.errors import AuthenticationError, RemoteError

__all__ = ["allgather_object", "broadcast_object"]

ObjectT = TypeVar("ObjectT")


def broadcast_object(
    obj: ObjectT | None, root: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> ObjectT:
    """Return the object of rank `root` on every rank: on `root` the object itself, elsewhere a copy.

        config = ronde.broadcast_object(load_config() if ronde.rank() == 0 else None)

    All ranks of `process_set` (None: all ranks) call it, from any thread.

    Args:
        obj: any object that `pickle` can copy; ranks other than `root` may pass None.
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
    at_root = rank() == root
    packed = _pack(obj, name, root) if at_root else _NOTHING
    header = _Header.read(broadcast(packed.header, root, f"{name}.header", process_set=process_set))
    content = packed.content if at_root else np.empty(header.length, np.uint8)
    content = broadcast(content, root, f"{name}.content", process_set=process_set)
    if packed.error is not None:
        raise packed.error
    return cast(ObjectT, obj if at_root else _unpack(header._replace(source=root), content, name))


def allgather_object(
    obj: ObjectT, name: str | None = None, process_set: ProcessSet | None = None
) -> list[ObjectT]:
    """Return the objects of all ranks as a list in the order of ranks, copied by pickle.

        losses = ronde.allgather_object({"rank": ronde.rank(), "loss": loss})

    All ranks of `process_set` (None: all ranks) call it, from any thread.

    Args:
        obj: any object that `pickle` can copy, of any size; it may differ between ranks.
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
    packed = _pack(obj, name, rank())
    sent = [
        allgather_async(packed.header[np.newaxis], f"{name}.header", process_set),
        allgather_async(packed.content, f"{name}.content", process_set),
    ]
    rows, contents = (handle.wait() for handle in sent)
    if packed.error is not None:
        raise packed.error
    headers = [_Header.read(row) for row in rows]
    sources = [header.source for header in headers]
    if sources != sorted(set(sources)):
        raise AuthenticationError(
            f"the objects '{name}' arrive as those of ranks {sources}, which do not ascend"
        )
    parts = np.split(contents, np.cumsum([header.length for header in headers])[:-1])
    return [_unpack(header, part, name) for header, part in zip(headers, parts)]


class _Header(NamedTuple):
    """The header of an object: its length in bytes, its rank, whether it is the text of an error, and the HMAC."""

    length: int
    source: int
    is_error: bool
    tag: bytes

    @classmethod
    def read(cls, header: np.ndarray[Any, Any]) -> _Header:
        return cls(*_HEADER.unpack(header.tobytes()))

    def packed(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(_HEADER.pack(*self), np.uint8)


class _Packed(NamedTuple):
    """A packed object; `error` is the reason why it cannot be pickled, if any."""

    header: np.ndarray[Any, Any]
    content: np.ndarray[Any, Any]
    error: Exception | None = None


_HEADER = struct.Struct("<QI?32s")
_NOTHING = _Packed(np.zeros(_HEADER.size, np.uint8), np.empty(0, np.uint8))


def _pack(obj: Any, name: str, source: int) -> _Packed:
    error = None
    try:
        content = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as failure:  # pickling runs the object's own code, which may raise anything
        error = failure
        content = "".join(traceback.format_exception(failure)).encode(errors="replace")
    is_error = error is not None
    header = _Header(len(content), source, is_error, _tag(content, is_error, name, source))
    return _Packed(header.packed(), np.frombuffer(content, np.uint8), error)


def _unpack(header: _Header, content: np.ndarray[Any, Any], name: str) -> Any:
    _, source, is_error, tag = header
    received = content.tobytes()
    if not hmac.compare_digest(tag, _tag(received, is_error, name, source)):
        raise AuthenticationError(
            f"the object '{name}' of rank {source} was altered in transit, so Ronde does not unpickle it "
            "(docs/security.md says how to protect all payload)"
        )
    if not is_error:
        return pickle.loads(received)
    text = received.decode()
    last_line = text.strip().rsplit("\n", 1)[-1]
    raise RemoteError(f"rank {source} cannot pickle its object: {last_line}", source, text)


def _tag(content: bytes, is_error: bool, name: str, source: int) -> bytes:
    """Return the HMAC of an object. A process that is alone has no job key, and needs none."""
    met = meeting()
    if met is None:
        return bytes(32)
    return met.key.hmac(b"object", name.encode(), b"%d %d" % (source, is_error), content)
