"""Exchanges bytes of any length between the ranks of a communicator: Ronde's messages, not tensors.

A function of the type `Exchange` gives every rank the bytes of all. There are three: that of a `WorldAttempt` at a
store, before a communicator exists (`comm/world_attempt`); `allgather_bytes` of all ranks; and `exchange_among` some of
them. `require_equal` checks through one of them that all ranks have the same values.

Messages from one rank, to another or to all, carry tags between hosts, with any setting `protection`. Messages gathered
from all ranks at once do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ronde.errors import MismatchError, ProtocolError
from ronde.typed_json import TypedJson

if TYPE_CHECKING:
    from ronde.comm.communicator import Communicator

__all__ = [
    "Exchange",
    "allgather_bytes",
    "as_texts",
    "broadcast_bytes",
    "check_equal",
    "exchange_among",
    "framed",
    "gather_bytes",
    "receive_bytes",
    "require_equal",
    "send_bytes",
    "unframed",
]

# Returns the bytes of all ranks, in rank order. All ranks call it.
Exchange = Callable[[bytes], list[bytes]]

_TEXTS: TypedJson[Mapping[str, str]] = TypedJson(Mapping[str, str], "list of values")
_LENGTH_BYTES = 8
_FIRST_BYTES = 2048  # enough for nearly all messages; the rest of a longer one follows in a second part
_ROOM = _FIRST_BYTES - _LENGTH_BYTES
_MOST_BYTES = 1 << 30  # of one message: bounds the memory that a peer can make this rank allocate
_TAG = 2**31 - 1  # of the messages of `exchange_among`


def framed(message: bytes) -> np.ndarray:
    """Return the message, preceded by its length, so that `unframed` can separate several messages."""
    return np.frombuffer(len(message).to_bytes(_LENGTH_BYTES, "little") + message, np.uint8)


def unframed(gathered: np.ndarray) -> list[bytes]:
    """Return the framed messages of a gathered array. Raises ProtocolError if one is incomplete."""
    data = gathered.tobytes()
    messages, begin = [], 0
    while begin < len(data):
        first = begin + _LENGTH_BYTES
        begin = first + int.from_bytes(data[begin:first], "little")
        messages.append(data[first:begin])
    if begin != len(data):
        raise ProtocolError(f"a message ends {begin - len(data)} bytes after what was gathered")
    return messages


def allgather_bytes(comm: Communicator, mine: bytes) -> list[bytes]:
    """Return the messages of all ranks. All ranks call it."""
    return unframed(comm.allgather(framed(mine)))


def gather_bytes(comm: Communicator, mine: bytes) -> list[bytes]:
    """Return the messages of all ranks on rank 0, an empty list on the others. All ranks call it."""
    gathered = comm.gather(framed(mine), 0)
    return [] if gathered is None else unframed(gathered)


def broadcast_bytes(comm: Communicator, message: bytes) -> bytes:
    """Return rank 0's message on every rank. All ranks call it; the messages of the others have no effect."""
    first = _first_part(message)
    comm._broadcast_sealed(first, 0)
    rest = np.empty(_length_of_rest(first), np.uint8)
    if rest.size:
        if comm.rank == 0:
            rest[:] = np.frombuffer(message, np.uint8)[_ROOM:]
        comm._broadcast_sealed(rest, 0)
    return _joined(first, rest)


def send_bytes(comm: Communicator, message: bytes, dest: int, tag: int = 0) -> None:
    """Send the message to rank `dest`, which calls `receive_bytes`."""
    comm._send_sealed(_first_part(message), dest, tag)
    if len(message) > _ROOM:
        comm._send_sealed(np.frombuffer(message, np.uint8)[_ROOM:], dest, tag)


def receive_bytes(comm: Communicator, source: int, tag: int = 0) -> bytes:
    """Return the next message from rank `source`."""
    first = np.empty(_FIRST_BYTES, np.uint8)
    comm._recv_sealed(first, source, tag)
    rest = np.empty(_length_of_rest(first), np.uint8)
    if rest.size:
        comm._recv_sealed(rest, source, tag)
    return _joined(first, rest)


def exchange_among(comm: Communicator, ranks: Sequence[int]) -> Exchange:
    """Return an exchange among some ranks of a communicator; the first of them collects and distributes the bytes."""
    first, *others = ranks

    def exchange(mine: bytes) -> list[bytes]:
        if comm.rank != first:
            send_bytes(comm, mine, first, _TAG)
            return unframed(np.frombuffer(receive_bytes(comm, first, _TAG), np.uint8))
        received = [mine, *(receive_bytes(comm, rank, _TAG) for rank in others)]
        everything = b"".join(framed(message).tobytes() for message in received)
        for rank in others:
            send_bytes(comm, everything, rank, _TAG)
        return received

    return exchange


def _first_part(message: bytes) -> np.ndarray:
    head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:_ROOM]
    return np.frombuffer(head.ljust(_FIRST_BYTES, b"\0"), np.uint8).copy()


def _length(first: np.ndarray) -> int:
    length = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
    if length > _MOST_BYTES:
        raise ProtocolError(f"a message of {length} bytes, where at most {_MOST_BYTES} are allowed")
    return length


def _length_of_rest(first: np.ndarray) -> int:
    return max(0, _length(first) - _ROOM)


def _joined(first: np.ndarray, rest: np.ndarray) -> bytes:
    return (first[_LENGTH_BYTES:].tobytes() + rest.tobytes())[: _length(first)]


# Values that must be equal


def require_equal(exchange: Exchange, values: Mapping[str, object]) -> None:
    """Compare the values with those of the other ranks, which all call it. Raises MismatchError on all of them."""
    check_equal([_TEXTS.decode(received) for received in exchange(_TEXTS.encode(as_texts(values)))])


def as_texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the values as texts, which are compared and shown."""
    return {name: repr(value) for name, value in values.items()}


def check_equal(received: Sequence[Mapping[str, str]]) -> None:
    """Raise MismatchError unless all ranks have the values of rank 0.

    `received`: the results of `as_texts`, by rank.
    """
    for rank, texts in enumerate(received):
        for name, text in received[0].items():
            if texts.get(name) != text:
                raise MismatchError(
                    f"{name} is {text} on rank 0 and {texts.get(name)} on rank {rank}: it must be the same on all ranks"
                )
