"""Makes communicators: the world, and those that are split off another communicator."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ronde import _native
from ronde.comm.affinity import core_of, starting_threads_on
from ronde.comm.bootstrap import RankRecord, Wiring, topology_of, wire, wire_again, wire_known
from ronde.comm.byte_exchange import Exchange, exchange_among
from ronde.comm.communicator import Communicator
from ronde.comm.shared_memory import await_all, share_bells, share_segment
from ronde.comm.topology import Topology
from ronde.errors import PeerLostError, TimeoutError, UsageError
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
        return self._make_world([wiring], purpose, deadline_ns)[0]

    def make_world_with_twin(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        purpose: str,
        deadline_ns: int,
        check: Callable[[], None] | None = None,
    ) -> tuple[Communicator, Communicator]:
        """Return the communicator of all ranks, and another one of them, with a separate order of calls.

        The second one has one connection to each rank of another host, whatever the setting `tcp_streams` is, and
        shares the symmetric memory of the first one. Otherwise as `make_world`.
        """
        streams = self.wanted.tcp_streams + 1
        wiring = wire(
            *(rank, size, exchange, self.wanted, self.key, purpose, deadline_ns, self.address, check),
            data_streams=streams,
        )
        world, twin = self._make_world([wiring, wiring.split_off_stream()], purpose, deadline_ns)
        return world, twin

    def make_known_world(
        self,
        rank: int,
        records: Sequence[RankRecord],
        listeners: Sequence[socket.socket],
        purpose: str,
        tag: bytes,
        deadline_ns: int,
    ) -> tuple[Communicator, Communicator]:
        """Return the same for ranks that know the records of all (`wire_known`), and need no store.

        Each rank returns when it is connected to all others. A rank that fails tells those that are connected why.
        `tag`: see `wire_known`.
        """
        topology = topology_of(rank, records)
        purposes = [purpose, f"{purpose} / twin"]
        connections = _native.SharedConnections({})
        with ExitStack() as on_error:
            watches = []
            for each in purposes:
                watches.append(_join_watch(connections, each, topology, range(topology.size)))
                on_error.callback(watches[-1].give_up)
            core = core_of(self.wanted.thread_affinity, topology.local_rank, topology.local_size)
            with _telling_failure(watches[0], topology), starting_threads_on(core):
                wiring = wire_known(
                    *(topology, records, listeners, self.wanted, self.key, purpose, deadline_ns, tag),
                    *(connections.add, watches[0].check),
                    data_streams=self.wanted.tcp_streams + 1,
                )
            on_error.pop_all()
        wirings = [wiring, wiring.split_off_stream()]
        parts = [_Part(*each) for each in zip(("world", "world / twin"), purposes, wirings, watches)]
        world, twin = self._finish_world(connections, parts, core, deadline_ns, has_barrier=False)
        return world, twin

    def _make_world(self, wirings: Sequence[Wiring], purpose: str, deadline_ns: int) -> list[Communicator]:
        """Return the world, and its twin if there is a second wiring."""
        wiring, topology = wirings[0], wirings[0].topology
        names = range(topology.size)
        core = core_of(self.wanted.thread_affinity, topology.local_rank, topology.local_size)
        with ExitStack() as on_error:
            for each in wirings:
                on_error.callback(each.close)
            with starting_threads_on(core):
                connections = _native.SharedConnections(wiring.take_controls())
                parts = []
                for number, each in enumerate(wirings):
                    suffix = " / twin" if number else ""
                    watch = _join_watch(connections, f"{purpose}{suffix}", topology, names)
                    parts.append(_Part(f"world{suffix}", f"{purpose}{suffix}", each, watch))
                    on_error.callback(parts[-1].give_up)
            on_error.pop_all()
            return self._finish_world(connections, parts, core, deadline_ns, has_barrier=True)

    def _finish_world(
        self,
        connections: _native.SharedConnections,
        parts: Sequence[_Part],
        core: int | None,
        deadline_ns: int,
        has_barrier: bool,
    ) -> list[Communicator]:
        """Return the communicators of these parts. This rank is connected to all others.

        `has_barrier`: return when all others are, too. Else a rank that leaves at once would be lost to those that
        still connect, unless they read what it says meanwhile (`wire_known`).
        No step is a call of a communicator, which may have no time limit: `deadline_ns` limits all of them.
        """
        wiring, topology = parts[0].wiring, parts[0].wiring.topology
        names = range(topology.size)
        with ExitStack() as on_error:
            for part in parts:
                on_error.callback(part.wiring.close)
                on_error.callback(part.give_up)
            # The messages are those of the first watch: other ranks may not have joined the second one yet.
            carrier = parts[0].watch
            if topology.local_size < topology.size:
                for peer, bell in share_bells(carrier, topology, deadline_ns).items():
                    connections.set_bell(peer, bell)
            factory = replace(self, core=core, connections=connections, address=wiring.address)
            with _telling_failure(carrier, topology):
                for part in parts:
                    nbytes = self._segment_bytes(topology.local_size)
                    part.segment = share_segment(carrier, topology, nbytes, deadline_ns)
                if has_barrier:
                    await_all(carrier, topology.rank, topology.size, deadline_ns)
            made: list[Communicator] = []
            for part in parts:
                native = factory._connect(
                    part.watch, part.wiring, part.take_segment(), made[0].native if made else None
                )
                made.append(factory._communicator(native, topology, part.purpose, part.label, names))
                on_error.callback(made[-1].shutdown)
            on_error.pop_all()
        return made

    def _make_child(
        self,
        purpose: str,
        parent: Communicator,
        ranks: list[int],
        name: str,
        is_twin: bool,
        exchange: Exchange | None,
        deadline_ns: int | None,
    ) -> Communicator:
        """Return a communicator of these ranks of the parent, which they make together.

        `purpose`: the parent's. `name`: the same on all ranks, and used once for these ranks. `is_twin`: it has all
        ranks of the parent, and shares its symmetric memory. `exchange`: among the ranks; None: by messages of the
        parent. `deadline_ns`: of the monotonic clock; None: after the start timeout.
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
        watch = _join_watch(self.connections, purpose, topology, names)
        try:
            exchange = exchange or exchange_among(parent, ranks)
            wiring = wire_again(
                topology, exchange, self.wanted, self.key, purpose, deadline_ns, self.address, watch.check
            )
            try:
                nbytes = self._segment_bytes(topology.local_size)
                segment = share_segment(watch, topology, nbytes, deadline_ns)
                native = self._connect(watch, wiring, segment, parent.native if is_twin else None)
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
        segment: int,
        twin: _native.Communicator | None,
    ) -> _native.Communicator:
        """Return the native communicator; this closes the descriptor `segment`. It exchanges nothing."""
        topology, wanted = wiring.topology, self.wanted
        return _native.connect(
            rank=topology.rank,
            hosts=list(topology.hosts),
            host_of=list(topology.host_of),
            cores=wiring.cores,
            segment=segment,
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


@dataclass
class _Part:
    """A communicator of a world that is being made. `segment`: a descriptor, or -1."""

    label: str
    purpose: str
    wiring: Wiring
    watch: _native.JoinedWatch
    segment: int = -1

    def take_segment(self) -> int:
        """Return the descriptor, which the caller closes."""
        segment, self.segment = self.segment, -1
        return segment

    def give_up(self) -> None:
        """Fail the communicator on the other ranks, unless it is complete."""
        self.watch.give_up()
        if (segment := self.take_segment()) >= 0:
            os.close(segment)


@contextmanager
def _telling_failure(watch: _native.JoinedWatch, topology: Topology) -> Iterator[None]:
    """If the block raises, tell the ranks that are connected why: else they would learn only that this one is gone.

    They wait for the same missing ranks, and lose the same one. To tell what another rank has told changes nothing.
    """
    try:
        yield
    except TimeoutError as error:
        watch.time_out(list(error.missing), str(error))
        raise
    except PeerLostError as error:
        watch.lose(error.rank, str(error))
        raise
    except BaseException as error:
        me = f"rank {topology.rank} on {topology.hosts[topology.rank]}"
        watch.lose(topology.rank, f"{me} failed while it connected: {type(error).__name__}: {error}")
        raise


def _join_watch(
    connections: _native.SharedConnections, purpose: str, topology: Topology, names: Sequence[int]
) -> _native.JoinedWatch:
    """Return the watch of a new communicator; from now on its ranks may send messages to this one."""
    return _native.JoinedWatch(connections, purpose, topology.rank, list(topology.hosts), list(names))
