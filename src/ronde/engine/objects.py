"""Python objects between ranks: pickled, and carried by the engine like any other array of bytes.

The rules:
  1. Objects travel pickled, and only between processes that have proved that they know the job key.
  2. A header goes first: the length of the pickle, and whether there is one. A rank whose object cannot be pickled
     sends the text of its error instead. It raises that error, and all other ranks raise RemoteError with the text, so
     that no rank waits for bytes that never come.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

import numpy as np

from ronde.comm.queries import rank
from ronde.engine.operations import allgather_async, broadcast
from ronde.engine.process_sets import ProcessSet
from ronde.errors import RemoteError

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any, root: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
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
        PeerLostError: a rank is gone.
        UsageError: `root` is not a rank, or this process is not in the set.
    """
    name = name or "broadcast_object"
    at_root = rank() == root
    packed = _pack(obj) if at_root else _NOTHING
    header = broadcast(packed.header, root, f"{name}.header", process_set=process_set)
    content = packed.content if at_root else np.empty(int(header[0]), np.uint8)
    content = broadcast(content, root, f"{name}.content", process_set=process_set)
    if packed.error is not None:
        raise packed.error
    return obj if at_root else _unpack(header, content, root)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
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
        PeerLostError: a rank is gone.
        UsageError: this process is not in the set.
    """
    name = name or "allgather_object"
    packed = _pack(obj)
    sent = [
        allgather_async(packed.header[np.newaxis], f"{name}.header", process_set),
        allgather_async(packed.content, f"{name}.content", process_set),
    ]
    headers, contents = (handle.wait() for handle in sent)
    if packed.error is not None:
        raise packed.error
    ranks = range(len(headers)) if process_set is None else process_set.ranks or range(len(headers))
    parts = np.split(contents, np.cumsum(headers[:, 0])[:-1])
    return [_unpack(header, part, source) for header, part, source in zip(headers, parts, ranks)]


class _Packed(NamedTuple):
    """An object on its way. `header`: length of `content` in bytes, and 1 if it is the text of an error."""

    header: np.ndarray[Any, Any]
    content: np.ndarray[Any, Any]
    error: Exception | None = None


_NOTHING = _Packed(np.zeros(2, np.int64), np.empty(0, np.uint8))


def _pack(obj: Any) -> _Packed:
    error = None
    try:
        content = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as failure:  # pickling runs the object's own code, which may raise anything
        error = failure
        content = "".join(traceback.format_exception(failure)).encode(errors="replace")
    header = np.array([len(content), error is not None], np.int64)
    return _Packed(header, np.frombuffer(content, np.uint8), error)


def _unpack(header: np.ndarray[Any, Any], content: np.ndarray[Any, Any], source: int) -> Any:
    if not header[1]:
        return pickle.loads(content.data)
    text = content.tobytes().decode()
    last_line = text.strip().rsplit("\n", 1)[-1]
    raise RemoteError(f"rank {source} cannot pickle its object: {last_line}", source, text)
