"""Carries the messages of a negotiation round: merged along the tree of hosts to rank 0, and from there to all ranks.

On one host, rank 0 gathers the messages of all ranks. On several hosts, the ranks of a host send theirs to its
leader, which merges them with those of its children and sends the result to its parent (`engine.tree`,
`engine.merging`). Rank 0 broadcasts its decisions. Everything runs on the engine's own communicator, and is sealed
between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ronde.comm.byte_exchange import gather_bytes, receive_bytes, send_bytes
from ronde.comm.communicator import Communicator
from ronde.engine.merging import Batch, BatchReader, batch_of_outboxes, encode_batch, merge_batches
from ronde.engine.messages import Message, encode_requests
from ronde.engine.tree import children, parent, ranks_under
from ronde.errors import ProtocolError

__all__ = ["Collector", "sent_by"]


class Collector:
    """A rank's place in the tree. Every rank of `comm` makes one, with the same arity."""

    def __init__(self, comm: Communicator, arity: int) -> None:
        self._comm = comm
        topology = comm.topology
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
        """Return the messages of all ranks on rank 0, an empty list on the others. All ranks call it."""
        mine = encode_requests(outbox)
        if self._is_one_host:
            gathered = gather_bytes(self._comm, mine)
            return [self._own_batch(dict(enumerate(gathered)))] if gathered else []
        if self._comm.rank != self._leader:
            send_bytes(self._comm, mine, self._leader)
            return []
        others = [rank for rank in self._local_ranks if rank != self._comm.rank]
        outboxes = {self._comm.rank: mine}
        for rank in others:
            with sent_by(self._comm, rank):
                outboxes[rank] = receive_bytes(self._comm, rank)
        reader = BatchReader()
        batches = [self._own_batch(outboxes)]
        for child, ranks in self._under.items():
            with sent_by(self._comm, child):
                batches.append(reader.read(receive_bytes(self._comm, child), ranks))
        if self._parent < 0:
            return batches
        send_bytes(self._comm, encode_batch(merge_batches(batches)), self._parent)
        return []

    def _own_batch(self, outboxes: Mapping[int, bytes]) -> Batch:
        try:
            return batch_of_outboxes(outboxes)
        except ProtocolError:
            for rank, outbox in outboxes.items():
                with sent_by(self._comm, rank):
                    batch_of_outboxes({rank: outbox})
            raise  # each outbox alone is valid


@contextmanager
def sent_by(comm: Communicator, rank: int) -> Iterator[None]:
    """Turn a ProtocolError in the block, which reads a message of `rank`, into the loss of that rank for all ranks."""
    try:
        yield
    except ProtocolError as error:
        comm.distrust(rank, f"an invalid message: {error}")
