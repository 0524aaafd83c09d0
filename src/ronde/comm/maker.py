"""Makes communicators: the world, and those that are split off it or each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ronde import _native
from ronde.comm.affinity import core_of, starting_threads_on
from ronde.comm.bootstrap import RECORD_LIMIT_BYTES, Exchange, Wiring, wire
from ronde.comm.communicator import Communicator
from ronde.core.stall_report import ranks_text
from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.settings import Settings

__all__ = ["CommunicatorMaker"]

# The numbers of cpp/algorithms/select.h.
_ALGORITHMS = ("auto", "direct", "ring", "doubling", "hierarchical")
_MAX_LOCAL_SIZE = 256  # kMaxLocalSize of cpp/host_segment.h
_TAG = 2**31 - 1  # of the messages that wire a new communicator
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class CommunicatorMaker:
    """What all communicators of a job have in common.

    `address`: the numeric one offered to other hosts; `core`: where our threads run, known once there is a world.
    """

    wanted: Settings
    key: JobKey
    address: str = "127.0.0.1"
    core: int | None = None

    def make(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        purpose: str,
        twin: _native.Communicator | None = None,
        label: str = "world",
        names: Sequence[int] | None = None,
    ) -> Communicator:
        """Return the communicator that its ranks make together; `purpose` is its name, alike on all, used once.

        `twin`: one of the same ranks, whose symmetric memory it shares. `label`: how messages call it. `names`: of its
        ranks in the world, None: it is the world.
        """
        wiring = wire(rank, size, exchange, self.wanted, self.key, self._segment_bytes, purpose, self.address)
        maker = self if self.core is not None else self._pinned(wiring)
        try:
            native = maker._connect(wiring, twin)
        except BaseException:
            wiring.lanes.close()
            raise
        splitter = _Splitter(maker, purpose)
        made = Communicator(
            native, wiring.topology, wiring.lanes, splitter, label, range(size) if names is None else names
        )
        with starting_threads_on(maker.core):
            made.watch_stalls(maker.wanted)
        return made

    def _pinned(self, wiring: Wiring) -> CommunicatorMaker:
        """Return the same with the core that the settings give this rank of the world."""
        topology = wiring.topology
        try:
            core = core_of(self.wanted.thread_affinity, topology.local_rank, topology.local_size)
        except BaseException:
            wiring.close()
            raise
        return replace(self, core=core)

    def _connect(self, wiring: Wiring, twin: _native.Communicator | None) -> _native.Communicator:
        topology, wanted = wiring.topology, self.wanted
        with starting_threads_on(self.core):
            return _native.connect(
                rank=topology.rank,
                hosts=list(topology.hosts),
                host_of=list(topology.host_of),
                cores=wiring.cores,
                segment=wiring.segment,
                bells=wiring.bells,
                controls={peer: wire.parts() for peer, wire in wiring.controls.items()},
                data={peer: [wire.parts() for wire in wires] for peer, wires in wiring.data.items()},
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


class _Splitter:
    """Makes the communicators that are split off one; `number` counts the splits, so that each has its own name."""

    def __init__(self, maker: CommunicatorMaker, purpose: str) -> None:
        self._maker = maker
        self._purpose = purpose

    def __call__(self, parent: Communicator, ranks: list[int], number: int, is_twin: bool) -> Communicator:
        # Groups that are split off at once have the same number; their ranks tell them apart.
        purpose = f"{self._purpose} / {number} of {','.join(map(str, ranks))}"
        twin = parent._native if is_twin else None
        names = [parent.names[rank] for rank in ranks]
        label = f"{'duplicate' if is_twin else 'group'} {number} of {parent.label}"
        if not is_twin:
            label += f" ({ranks_text(names)})"
        return self._maker.make(
            *(ranks.index(parent.rank), len(ranks), _exchange_among(parent, ranks), purpose),
            *(twin, label, names),
        )


def _exchange_among(parent: Communicator, ranks: list[int]) -> Exchange:
    """Return an exchange among some ranks of a communicator; the first of them collects and hands out."""
    first, *others = ranks

    def exchange(mine: bytes) -> list[bytes]:
        rows = np.zeros((len(ranks), _LENGTH_BYTES + RECORD_LIMIT_BYTES), np.uint8)
        row = rows[ranks.index(parent.rank)]
        row[:_LENGTH_BYTES] = np.frombuffer(len(mine).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        row[_LENGTH_BYTES : _LENGTH_BYTES + len(mine)] = np.frombuffer(mine, np.uint8)
        if parent.rank != first:
            parent._send_sealed(row, first, _TAG)
            parent._recv_sealed(rows, first, _TAG)
        else:
            for index, rank in enumerate(others, start=1):
                parent._recv_sealed(rows[index], rank, _TAG)
            for rank in others:
                parent._send_sealed(rows, rank, _TAG)
        return [_payload(row.tobytes()) for row in rows]

    return exchange


def _payload(row: bytes) -> bytes:
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    return row[_LENGTH_BYTES : _LENGTH_BYTES + length]
