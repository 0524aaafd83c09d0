"""Makes communicators: the world, and those that are split off another communicator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ronde import _native
from ronde.comm.affinity import core_of, starting_threads_on
from ronde.comm.bootstrap import Wiring, wire, wire_again
from ronde.comm.byte_exchange import Exchange, exchange_among
from ronde.comm.communicator import Communicator
from ronde.comm.shared_memory import await_all, share_bells, share_segment
from ronde.comm.topology import Topology
from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.settings import Settings
from ronde.stall.reports import ranks_text

__all__ = ["CommunicatorFactory"]

# The numbers of cpp/algorithms/select.h.
_ALGORITHMS = ("auto", "direct", "ring", "doubling", "hierarchical")
_MAX_LOCAL_SIZE = 256  # kMaxLocalSize of cpp/host/host_segment.h


@dataclass(frozen=True)
class CommunicatorFactory:
    """Makes the communicators of a job, which share these properties.

    `address`: the numeric address that this host offers to others. `core`: of Ronde's threads, and `connections`: to
    the other processes; both are known once the world exists.
    """

    wanted: Settings
    key: JobKey
    address: str = "127.0.0.1"
    core: int | None = None
    connections: _native.SharedConnections | None = None

    def make_world(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        purpose: str,
        deadline_ns: int,
        check: Callable[[], None] | None = None,
    ) -> Communicator:
        """Return the communicator of all ranks, which they make together. No rank returns before all are connected.

        `purpose`: its name, the same on all ranks, used once. `deadline_ns`: of the monotonic clock, for all steps.
        `check`: raises an error if another rank has failed.
        """
        wiring = wire(rank, size, exchange, self.wanted, self.key, purpose, deadline_ns, self.address, check)
        try:
            topology, wanted = wiring.topology, self.wanted
            core = core_of(wanted.thread_affinity, topology.local_rank, topology.local_size)
            with starting_threads_on(core):
                connections = _native.SharedConnections(wiring.take_controls())
                watch = _join_watch(connections, purpose, topology, range(size))
            try:
                if topology.local_size < size:
                    for peer, bell in share_bells(watch, topology, deadline_ns).items():
                        connections.set_bell(peer, bell)
                factory = replace(self, core=core, connections=connections, address=wiring.address)
                native = factory._connect(watch, wiring, None, deadline_ns)
            except BaseException:
                watch.give_up()
                raise
        except BaseException:
            wiring.close()
            raise
        world = factory._communicator(native, topology, purpose, "world", range(size))
        try:
            # Else a rank that leaves at once would be lost to those that still connect to others.
            await_all(native, rank, size, deadline_ns)
        except BaseException:
            world.shutdown()
            raise
        return world

    def _make_child(
        self,
        purpose: str,
        parent: Communicator,
        ranks: list[int],
        name: str,
        is_twin: bool,
        exchange: Exchange | None,
        deadline_ns: int | None,
        tcp_streams: int | None = None,
    ) -> Communicator:
        """Return a communicator of these ranks of the parent, which they make together.

        `purpose`: the parent's. `name`: the same on all ranks, and used once for these ranks. `is_twin`: it has all
        ranks of the parent, and shares its symmetric memory. `exchange`: among the ranks; None: by messages of the
        parent. `deadline_ns`: of the monotonic clock; None: after the start timeout. `tcp_streams`: between hosts,
        instead of the setting.
        """
        assert self.connections is not None
        # Groups of one split have the same name; their ranks distinguish them.
        purpose = f"{purpose} / {name} of {','.join(map(str, ranks))}"
        names = [parent.names[rank] for rank in ranks]
        label = f"{'duplicate' if is_twin else 'group'} {name} of {parent.label}"
        if not is_twin:
            label += f" ({ranks_text(names)})"
        topology = parent.topology.of_ranks(ranks)
        if deadline_ns is None:
            deadline_ns = time.monotonic_ns() + self.wanted.start_timeout_ns
        wanted = self.wanted if tcp_streams is None else replace(self.wanted, tcp_streams=tcp_streams)
        watch = _join_watch(self.connections, purpose, topology, names)
        try:
            exchange = exchange or exchange_among(parent, ranks)
            wiring = wire_again(
                topology, exchange, wanted, self.key, purpose, deadline_ns, self.address, watch.check
            )
            try:
                native = self._connect(watch, wiring, parent.native if is_twin else None, deadline_ns)
            except BaseException:
                wiring.close()
                raise
        except BaseException:
            watch.give_up()
            raise
        return self._communicator(native, topology, purpose, label, names)

    def _communicator(
        self, native: _native.Communicator, topology: Topology, purpose: str, label: str, names: Sequence[int]
    ) -> Communicator:
        made = Communicator(native, topology, partial(self._make_child, purpose), label, names)
        with starting_threads_on(self.core):
            made.watch_stalls(self.wanted)
        return made

    def _connect(
        self,
        watch: _native.JoinedWatch,
        wiring: Wiring,
        twin: _native.Communicator | None,
        deadline_ns: int,
    ) -> _native.Communicator:
        topology, wanted = wiring.topology, self.wanted
        segment_bytes = self._segment_bytes(topology.local_size)
        return _native.connect(
            rank=topology.rank,
            hosts=list(topology.hosts),
            host_of=list(topology.host_of),
            cores=wiring.cores,
            segment=share_segment(watch, topology, segment_bytes, deadline_ns),
            watch=watch,
            data=wiring.take_data(),
            allreduce_algorithm=_ALGORITHMS.index(wanted.allreduce_algorithm),
            switch_over=[wanted.hierarchical_bytes, wanted.doubling_bytes, wanted.ring_bytes],
            staging_bytes=wanted.staging_bytes,
            timeout_ns=wanted.timeout_ns,
            spin_us=wanted.spin_us,
            adasum_hierarchical=wanted.adasum_hierarchical,
            hierarchical_allgather=wanted.hierarchical_allgather,
            seals_payload=wanted.protection != "messages",
            twin=twin,
        )

    def _segment_bytes(self, local_size: int) -> int:
        if local_size > _MAX_LOCAL_SIZE:
            raise UsageError(
                f"{local_size} ranks on host {os.uname().nodename}: at most {_MAX_LOCAL_SIZE} can share a host's "
                "memory; with different values of RONDE_HOST_ID groups of them count as several hosts"
            )
        return _native.host_segment_bytes(local_size, self.wanted.staging_bytes)


def _join_watch(
    connections: _native.SharedConnections, purpose: str, topology: Topology, names: Sequence[int]
) -> _native.JoinedWatch:
    """Return the watch of a new communicator; from now on its ranks may send messages to this one."""
    return _native.JoinedWatch(connections, purpose, topology.rank, list(topology.hosts), list(names))
