"""Shares memory between the ranks of a host, by file descriptors that travel over Unix sockets."""

from __future__ import annotations

import builtins
import fcntl
import os
import socket
import time
from collections.abc import Callable

from ronde.core.placement import Topology
from ronde.errors import MismatchError, PeerError, PeerLostError, TimeoutError
from ronde.net.descriptors import receive_descriptors, send_descriptors

__all__ = ["Lanes"]


class Lanes:
    """How file descriptors travel inside a host: one Unix connection between its leader and each other rank."""

    def __init__(self, topology: Topology, by_rank: dict[int, socket.socket]) -> None:
        self._topology = topology
        self._by_rank = dict(sorted(by_rank.items()))

    @property
    def _is_leader(self) -> bool:
        return self._topology.rank == self._topology.leader

    def share_segment(self, nbytes: int, deadline_ns: int | None = None) -> int:
        """Return a file descriptor of zeroed memory that all ranks of the host share; all of them call it alike.

        The memory has no name and a size that nobody can change; it goes with the last descriptor and mapping.
        Raises PeerLostError, TimeoutError at the deadline (of `time.monotonic_ns()`, None: never), MismatchError if
        the ranks disagree about the size, and on all ranks an error if the leader could not make it.
        """
        leader = self._topology.leader
        if not self._is_leader:
            segment = self._receive(leader, 1, deadline_ns)[0]
            made = os.fstat(segment).st_size
            if made != nbytes:
                os.close(segment)
                raise MismatchError(
                    f"rank {leader} made a segment of {made} bytes, this rank expects {nbytes}"
                )
            return segment
        try:
            segment = _make_segment(nbytes)
        except OSError:
            self._send_all([], deadline_ns)
            raise
        try:
            self._send_all([segment], deadline_ns)
        except BaseException:
            os.close(segment)
            raise
        return segment

    def share_bells(self, deadline_ns: int | None = None) -> list[int]:
        """Make this rank's eventfd; return those of the host's ranks, in local order. Raises as `share_segment`."""
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        bells = [bell]
        try:
            if self._is_leader:
                for rank in self._by_rank:
                    bells += self._receive(rank, 1, deadline_ns)
                self._send_all(bells, deadline_ns)
                return bells
            leader = self._topology.leader
            self._guarded(leader, lambda lane: send_descriptors(lane, bells, deadline_ns))
            everyones = self._receive(leader, self._topology.local_size, deadline_ns)
        except BaseException:
            _close_all(bells)
            raise
        os.close(bell)
        return everyones

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        for lane in self._by_rank.values():
            lane.close()

    def _send_all(self, descriptors: list[int], deadline_ns: int | None) -> None:
        for rank in self._by_rank:
            self._guarded(rank, lambda lane: send_descriptors(lane, descriptors, deadline_ns))

    def _receive(self, rank: int, count: int, deadline_ns: int | None) -> list[int]:
        received: list[int] = []
        self._guarded(rank, lambda lane: received.extend(receive_descriptors(lane, count, deadline_ns)))
        if not received:
            raise PeerError(f"rank {rank} could not make the shared memory; its own error says why")
        return received

    def _guarded(self, rank: int, action: Callable[[socket.socket], None]) -> None:
        """Do something with the lane to a rank; say which rank it was if it fails."""
        started_ns = time.monotonic_ns()
        try:
            action(self._by_rank[rank])
        except builtins.TimeoutError:
            waited_ns = time.monotonic_ns() - started_ns
            message = f"waited {waited_ns / 1e9:.3g} s for shared memory from rank {rank}"
            raise TimeoutError(message, operation="init", waited_ns=waited_ns, missing=(rank,)) from None
        except ConnectionError as error:
            host = self._topology.hosts[rank]
            raise PeerLostError(f"lost rank {rank} on {host}: {error}", rank, host) from None


def _make_segment(nbytes: int) -> int:
    """Return zeroed memory without a name, of a size fixed for good: a shrunken one would kill whoever reads it."""
    segment = os.memfd_create("ronde", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(segment, 0o600)
        os.ftruncate(segment, nbytes)
        fcntl.fcntl(segment, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(segment)
        raise
    return segment


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
