"""How messages travel in a cold round: collected on rank 0, and from there to everybody."""

from __future__ import annotations

import numpy as np

from ronde.comm.communicator import Communicator

__all__ = ["gather_bytes", "share_bytes"]

_LENGTH_BYTES = 8
_FIRST_BYTES = 2048  # what nearly always suffices; a longer message follows in a second broadcast


def gather_bytes(comm: Communicator, mine: bytes) -> list[bytes]:
    """Return what every rank passes on rank 0, an empty list on the others. All ranks call it."""
    framed = np.frombuffer(len(mine).to_bytes(_LENGTH_BYTES, "little") + mine, np.uint8)
    gathered = comm.gather(framed, 0)
    messages = []
    if gathered is not None:
        rest = gathered.tobytes()
        while rest:
            end = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "little")
            messages.append(rest[_LENGTH_BYTES:end])
            rest = rest[end:]
    return messages


def share_bytes(comm: Communicator, message: bytes) -> bytes:
    """Return rank 0's message on every rank. All ranks call it; what the others pass does not matter."""
    first = np.zeros(_FIRST_BYTES, np.uint8)
    room = _FIRST_BYTES - _LENGTH_BYTES
    if comm.rank == 0:
        head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:room]
        first[: len(head)] = np.frombuffer(head, np.uint8)
    comm.broadcast(first, 0, out=first)
    received = first.tobytes()
    length = int.from_bytes(received[:_LENGTH_BYTES], "little")
    if length <= room:
        return received[_LENGTH_BYTES : _LENGTH_BYTES + length]
    rest = np.empty(length - room, np.uint8)
    if comm.rank == 0:
        rest[:] = np.frombuffer(message[room:], np.uint8)
    comm.broadcast(rest, 0, out=rest)
    return received[_LENGTH_BYTES:] + rest.tobytes()
