"""How messages travel in a cold round: merged along the tree of hosts to rank 0, and from there to everybody.

On one host rank 0 gathers them from all ranks at once. On several, the ranks of a host send theirs to its leader, who
merges them with what its children send and sends the result to its parent (`core.tree`, `core.merging`). What rank 0
decides is broadcast. Everything runs in the engine's own communicator, and is sealed between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ronde.comm.communicator import Communicator
from ronde.core.merging import Batch, BatchReader, batch_of_outboxes, encode_batch, merge_batches
from ronde.core.messages import Message, encode_requests
from ronde.core.tree import children, parent, ranks_under
from ronde.errors import ProtocolError

__all__ = ["Collector", "gather_bytes", "sent_by", "share_bytes"]

_LENGTH_BYTES = 8
_FIRST_BYTES = 2048  # what nearly always suffices; a longer message follows in a second part
_ROOM = _FIRST_BYTES - _LENGTH_BYTES
_MOST_BYTES = 1 << 30  # of one message: bounds the memory that a peer can ask for


class Collector:
    """A rank's place in the tree. Every rank of `comm` makes one, with the same arity."""

    def __init__(self, comm: Communicator, arity: int) -> None:
        self._comm = comm
        topology = comm._topology
        ranks_of_host: list[list[int]] = [[] for _ in range(max(topology.host_of) + 1)]
        for rank, host in enumerate(topology.host_of):
            ranks_of_host[host].append(rank)
        host, hosts = topology.host_of[comm.rank], len(ranks_of_host)
        self._is_one_host = hosts == 1
        self._leader = topology.leader
        self._local_ranks = topology.local_ranks
        self._parent = ranks_of_host[parent(host, arity)][0] if host > 0 else -1
        self._under = {
            ranks_of_host[child][0]: ranks_under(child, ranks_of_host, arity)
            for child in (children(host, hosts, arity) if comm.rank == self._leader else ())
        }

    def collect(self, outbox: Sequence[Message]) -> list[Batch]:
        """Return on rank 0 what all ranks say, an empty list on the others. All ranks call it."""
        mine = encode_requests(outbox)
        if self._is_one_host:
            gathered = gather_bytes(self._comm, mine)
            return [self._own_batch(dict(enumerate(gathered)))] if gathered else []
        if self._comm.rank != self._leader:
            _send_bytes(self._comm, mine, self._leader)
            return []
        others = [rank for rank in self._local_ranks if rank != self._comm.rank]
        outboxes = {self._comm.rank: mine}
        for rank in others:
            with sent_by(self._comm, rank):
                outboxes[rank] = _receive_bytes(self._comm, rank)
        reader = BatchReader()
        batches = [self._own_batch(outboxes)]
        for child, ranks in self._under.items():
            with sent_by(self._comm, child):
                batches.append(reader.read(_receive_bytes(self._comm, child), ranks))
        if self._parent < 0:
            return batches
        _send_bytes(self._comm, encode_batch(merge_batches(batches)), self._parent)
        return []

    def _own_batch(self, outboxes: Mapping[int, bytes]) -> Batch:
        try:
            return batch_of_outboxes(outboxes)
        except ProtocolError:
            for rank, outbox in outboxes.items():
                with sent_by(self._comm, rank):
                    batch_of_outboxes({rank: outbox})
            raise  # each by itself is well-formed


@contextmanager
def sent_by(comm: Communicator, rank: int) -> Iterator[None]:
    """Turn a ProtocolError into the loss of `rank`, which has sent what is read here; all ranks hear of it."""
    try:
        yield
    except ProtocolError as error:
        comm._native.distrust(rank, f"what cannot be followed: {error}")


def _send_bytes(comm: Communicator, message: bytes, dest: int) -> None:
    comm._send_sealed(_first_part(message), dest)
    if len(message) > _ROOM:
        comm._send_sealed(np.frombuffer(message, np.uint8)[_ROOM:], dest)


def _receive_bytes(comm: Communicator, source: int) -> bytes:
    first = np.empty(_FIRST_BYTES, np.uint8)
    comm._recv_sealed(first, source)
    received = first.tobytes()
    length = _length_in(received)
    if length <= _ROOM:
        return bytes(received[_LENGTH_BYTES : _LENGTH_BYTES + length])
    rest = np.empty(length - _ROOM, np.uint8)
    comm._recv_sealed(rest, source)
    return bytes(received[_LENGTH_BYTES:] + rest.tobytes())


def _first_part(message: bytes) -> np.ndarray:
    first = np.zeros(_FIRST_BYTES, np.uint8)
    head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:_ROOM]
    first[: len(head)] = np.frombuffer(head, np.uint8)
    return first


def _length_in(received: bytes) -> int:
    length = int.from_bytes(received[:_LENGTH_BYTES], "little")
    if length > _MOST_BYTES:
        raise ProtocolError(f"a message of {length} bytes, where at most {_MOST_BYTES} are allowed")
    return length


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
    first = _first_part(message)
    comm._broadcast_sealed(first, 0)
    received = first.tobytes()
    length = _length_in(received)
    if length <= _ROOM:
        return received[_LENGTH_BYTES : _LENGTH_BYTES + length]
    rest = np.empty(length - _ROOM, np.uint8)
    if comm.rank == 0:
        rest[:] = np.frombuffer(message, np.uint8)[_ROOM:]
    comm._broadcast_sealed(rest, 0)
    return received[_LENGTH_BYTES:] + rest.tobytes()
