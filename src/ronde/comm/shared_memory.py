"""Shares memory among the ranks of one host: file descriptors travel over their control connections."""

from __future__ import annotations

import fcntl
import os
import time
from typing import Protocol

from ronde.comm.topology import Topology
from ronde.errors import MismatchError, PeerError, TimeoutError

__all__ = ["DescriptorCarrier", "await_all", "share_bells", "share_segment"]

_NO_ROOM = -2  # Watch::kNoRoom of cpp/failures/watch.h
_VERDICT_NS = 10**9  # beyond the deadline, for rank 0's failure
_SIGNALS_NS = 100 * 10**6  # how often a waiting rank lets Python handle signals


class DescriptorCarrier(Protocol):
    """Carries descriptors between the ranks of a communicator: the communicator, or its watch before it exists."""

    def send_descriptor(self, rank: int, fd: int, /) -> None:
        """Send a rank a duplicate of the descriptor, or for -1 a note that there is none. Never blocks."""

    def receive_descriptor(self, rank: int, timeout_ns: int, /) -> int | None:
        """Return the next descriptor from the rank, or None after `timeout_ns`. Raises PeerError."""


def share_segment(carrier: DescriptorCarrier, topology: Topology, nbytes: int, deadline_ns: int) -> int:
    """Return a file descriptor of zeroed memory that all ranks of the host share; all of them call it.

    The memory has no name and a fixed size, and disappears with its last descriptor and mapping. `deadline_ns`: of
    `time.monotonic_ns()`. Raises PeerLostError, TimeoutError at the deadline, MismatchError if the ranks disagree about
    the size, and an error on all ranks if the leader cannot make the memory.
    """
    leader = topology.leader
    if topology.rank != leader:
        segment = _receive(carrier, leader, deadline_ns)
        made = os.fstat(segment).st_size
        if made != nbytes:
            os.close(segment)
            raise MismatchError(
                f"rank {leader} made a segment of {made} bytes, but this rank expects {nbytes}"
            )
        return segment
    segment = -1
    try:
        segment = _make_segment(nbytes)
    finally:
        for rank in topology.local_ranks[1:]:
            carrier.send_descriptor(rank, segment)
    return segment


def share_bells(carrier: DescriptorCarrier, topology: Topology, deadline_ns: int) -> dict[int, int]:
    """Return an eventfd for each rank of the host, by rank; each rank makes one. Raises as `share_segment`."""
    bells = {topology.rank: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)}
    others = [rank for rank in topology.local_ranks if rank != topology.rank]
    try:
        for rank in others:
            carrier.send_descriptor(rank, bells[topology.rank])
        for rank in others:
            bells[rank] = _receive(carrier, rank, deadline_ns)
    except BaseException:
        for bell in bells.values():
            os.close(bell)
        raise
    return bells


def await_all(carrier: DescriptorCarrier, rank: int, size: int, deadline_ns: int) -> None:
    """Return when all ranks of the communicator have called this. Raises PeerLostError, TimeoutError at the deadline.

    Ranks other than 0 wait a second longer: rank 0 knows which ranks are missing, and its caller tells the others.

    It is a barrier that does not count as a call of the communicator: notes without descriptors go to rank 0 and back.
    """
    what = "rank {} to connect to all others"
    if rank != 0:
        carrier.send_descriptor(0, -1)
        _await_note(carrier, 0, deadline_ns + _VERDICT_NS, what)
        return
    for peer in range(1, size):
        _await_note(carrier, peer, deadline_ns, what)
    for peer in range(1, size):
        carrier.send_descriptor(peer, -1)


def _receive(carrier: DescriptorCarrier, rank: int, deadline_ns: int) -> int:
    received = _await_note(carrier, rank, deadline_ns, "shared memory from rank {}")
    if received == _NO_ROOM:
        raise OSError(
            f"the memory that rank {rank} shares could not be opened: this process has run out of file descriptors "
            "(see `ulimit -n`)"
        )
    if received < 0:
        raise PeerError(f"rank {rank} could not make the shared memory; its own error says why")
    return received


def _await_note(carrier: DescriptorCarrier, rank: int, deadline_ns: int, what: str) -> int:
    """Return the next descriptor from the rank, or a negative number: a note that there is none."""
    started_ns = time.monotonic_ns()
    while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
        received = carrier.receive_descriptor(rank, min(left_ns, _SIGNALS_NS))
        if received is not None:
            return received
    waited_ns = time.monotonic_ns() - started_ns
    message = f"waited {waited_ns / 1e9:.3g} s for {what.format(rank)}"
    raise TimeoutError(message, operation="init", waited_ns=waited_ns, missing=(rank,))


def _make_segment(nbytes: int) -> int:
    """Return zeroed memory without a name. Its size is sealed: reading beyond a shrunken end would kill a process."""
    segment = os.memfd_create("ronde", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(segment, 0o600)
        os.ftruncate(segment, nbytes)
        fcntl.fcntl(segment, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(segment)
        raise
    return segment
