"""Connects the ranks of a communicator, which can exchange small texts, for the native data plane.

The steps, the same on every rank:
  1. Every rank sends all others its host, the Unix socket where it listens for ranks of the same host, and the values
     that must be equal. If there is more than one host, every rank also opens a TCP port and sends its number.
  2. Each rank connects to the lower ranks and accepts connections of the higher ones: a control connection for every
     other rank, and data connections for each rank on another host.

Communicators that are split off another one share the control connections of their process, which the world has opened.
So they open only the data connections between hosts.

Ranks that listen before there is a world can tell their records to each other in another way (`wire_known`).
"""

from __future__ import annotations

import functools
import operator
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from ronde.comm.byte_exchange import Exchange, as_texts, check_equal
from ronde.comm.topology import Topology, compute_topology
from ronde.comm.world_attempt import RECORD_LIMIT_BYTES
from ronde.errors import ProtocolError, VersionError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, address_towards, is_loopback, listen, parse_address
from ronde.net.authentication import PROTOCOL_VERSION, SECRET, ConnectionKeys
from ronde.net.connections import NO_TAG, Channel, Connection, Slot, open_connections
from ronde.net.descriptors import make_room
from ronde.net.host import host_identity, host_name
from ronde.process.resources import usable_core_numbers
from ronde.settings import Settings
from ronde.typed_json import TypedJson

__all__ = ["NativeWire", "RankRecord", "Wiring", "topology_of", "wire", "wire_again", "wire_known"]

MUST_AGREE = (
    *("transport", "protection", "tcp_streams"),
    *("staging_bytes", "adasum_hierarchical", "hierarchical_allgather"),
    *("allreduce_algorithm", "hierarchical_bytes", "doubling_bytes", "ring_bytes"),
)
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S = 2, 1
LONGEST_KEEPALIVE_IDLE_S = 32767  # the kernel's limit


NativeWire = tuple[int, bytes, bytes, bool]  # a connection in the form that the native side takes


class Wire(NamedTuple):
    """A connection to another rank; `keys` are those of its messages, None within a host."""

    descriptor: int
    keys: ConnectionKeys | None

    def parts(self) -> NativeWire:
        """Return the connection in the form that the native side takes."""
        return self.descriptor, *(self.keys.parts() if self.keys else (b"", b"", False))


@dataclass
class Wiring:
    """The connections of one rank to the others; `take_controls` and `take_data` transfer the descriptors.

    `cores`: the number of cores on which the ranks of the host may run together, even if each is bound to one of them.
    `controls`: one connection per other rank, none in a communicator that is split off another. `data`: connections
    to each rank on another host, equally many. `address`: where this rank listens for other hosts. Sockets are
    non-blocking.
    """

    topology: Topology
    cores: int
    controls: dict[int, Wire]
    data: dict[int, list[Wire]]
    address: str = ""

    def close(self) -> None:
        """Close the connections that were not taken. Call it once."""
        for wire in [*self.controls.values(), *(wire for several in self.data.values() for wire in several)]:
            os.close(wire.descriptor)

    def split_off_stream(self) -> Wiring:
        """Return a wiring of the same ranks, which takes one data connection of each rank on another host from this
        one.
        """
        taken = {peer: [wires.pop()] for peer, wires in self.data.items()}
        return Wiring(self.topology, self.cores, {}, taken, self.address)

    def take_controls(self) -> dict[int, NativeWire]:
        """Return the control connections as the native side takes them, which closes them."""
        taken, self.controls = self.controls, {}
        return {peer: wire.parts() for peer, wire in taken.items()}

    def take_data(self) -> dict[int, list[NativeWire]]:
        """Return the data connections as the native side takes them, which closes them."""
        taken, self.data = self.data, {}
        return {peer: [wire.parts() for wire in wires] for peer, wires in taken.items()}


def wire(
    rank: int,
    size: int,
    exchange: Exchange,
    settings: Settings,
    key: JobKey,
    purpose: str,
    deadline_ns: int,
    address: str = "127.0.0.1",
    check: Callable[[], None] | None = None,
    data_streams: int | None = None,
) -> Wiring:
    """Connect this rank with all others of the world. All ranks call it.

    `purpose` names the communicator, the same on all ranks and used once. `deadline_ns`, of the monotonic clock, is
    that of step 2; `exchange` has its own. `address` is the numeric address that this host offers to others. `check`
    is called regularly in step 2, and raises an error if another rank has failed. `data_streams`: how many data
    connections each rank of another host gets, the same on all ranks; None: as the settings say. Raises TimeoutError
    that names the missing ranks, PeerLostError, MismatchError if settings differ that must be equal,
    AuthenticationError or VersionError; then all connections are closed.
    """
    mine = RankRecord.of(str(rank), settings, address, size)
    if size == 1:
        return Wiring(compute_topology(0, [""], [host_name()]), mine.cores.bit_count(), {}, {})
    with ExitStack() as listeners:
        plan = _agree(mine, rank, exchange, listeners)
        slots = _slots(plan, data_streams or settings.tcp_streams, has_controls=True)
        return _connect(plan, slots, settings, key, purpose, deadline_ns, check)


def wire_known(
    topology: Topology,
    records: Sequence[RankRecord],
    listeners: Sequence[socket.socket],
    settings: Settings,
    key: JobKey,
    purpose: str,
    deadline_ns: int,
    tag: bytes,
    adopt: Callable[[dict[int, NativeWire]], None],
    check: Callable[[], None],
    data_streams: int,
) -> Wiring:
    """Connect the ranks of a world, who know the records of all. All of them call it.

    `topology`: see `topology_of`. `listeners`: of this rank, which stay open and serve other worlds, too. `tag`: 8
    bytes, of this world alone. `adopt` takes the control connections, by rank, in one or more calls, also if this
    raises an error; then `check` raises the failures that other ranks tell, or their loss. Otherwise as `wire`.
    """
    check_equal([record.alike for record in records])
    cores = functools.reduce(operator.or_, (records[each].cores for each in topology.local_ranks))
    targets = [
        parse_address(record.unix if topology.is_local(rank) else record.address)
        for rank, record in enumerate(records)
    ]
    plan = _Plan(topology, cores, targets, list(listeners), targets[topology.rank].host)
    slots = _slots(plan, data_streams, has_controls=True)
    return _connect(plan, slots, settings, key, purpose, deadline_ns, check, tag, adopt)


def topology_of(rank: int, records: Sequence[RankRecord]) -> Topology:
    """Return the topology of the ranks that have these records."""
    return compute_topology(rank, [record.key for record in records], [record.name for record in records])


def wire_again(
    topology: Topology,
    exchange: Exchange,
    settings: Settings,
    key: JobKey,
    purpose: str,
    deadline_ns: int,
    address: str,
    check: Callable[[], None],
) -> Wiring:
    """Connect ranks that have control connections already. All of them call it.

    `check` raises the failure of the new communicator, such as a lost rank; otherwise as `wire`.
    """
    with ExitStack() as listeners:
        target = ""
        if topology.local_size < topology.size:
            tcp, tcp_address = listen(Address(host=address))
            listeners.enter_context(tcp)
            target = str(tcp_address)
        received = exchange(f"{_usable_cores():x} {target}".encode())
        cores_of, targets = zip(*(_cores_and_target(payload, peer) for peer, payload in enumerate(received)))
        cores = functools.reduce(operator.or_, (cores_of[each] for each in topology.local_ranks))
        if not target:
            return Wiring(topology, cores.bit_count(), {}, {})
        plan = _Plan(topology, cores, [parse_address(each) for each in targets], [tcp], address)
        slots = _slots(plan, settings.tcp_streams, has_controls=False)
        return _connect(plan, slots, settings, key, purpose, deadline_ns, check)


def _cores_and_target(payload: bytes, rank: int) -> tuple[int, str]:
    """Return the cores on which a rank may run, and where it listens for other hosts. Raises ProtocolError."""
    try:
        cores, target = payload.decode().split(" ")
        return int(cores, 16), target
    except ValueError:
        raise ProtocolError(f"the start-up record of rank {rank} is malformed") from None


def _connect(
    plan: _Plan,
    slots: tuple[dict[Slot, Address], list[Slot]],
    settings: Settings,
    key: JobKey,
    purpose: str,
    deadline_ns: int,
    check: Callable[[], None] | None = None,
    tag: bytes = NO_TAG,
    adopt: Callable[[dict[int, NativeWire]], None] | None = None,
) -> Wiring:
    """Do step 2."""
    topology, (outgoing, incoming) = plan.topology, slots
    make_room(
        len(outgoing) + len(incoming) + topology.local_size, f"connecting to {topology.size - 1} other ranks"
    )

    def adopt_tuned(controls: Mapping[Slot, Connection]) -> None:
        assert adopt is not None
        for slot, (sock, _) in controls.items():
            _tune(sock, slot.channel, settings.peer_timeout_ns)
        adopt({slot.peer: Wire(sock.detach(), keys).parts() for slot, (sock, keys) in controls.items()})

    connections = open_connections(
        topology.rank,
        list(topology.hosts),
        plan.listeners,
        outgoing,
        incoming,
        key,
        purpose,
        deadline_ns,
        settings.protection == SECRET,
        check,
        tag,
        None if adopt is None else adopt_tuned,
        dict(enumerate(plan.targets)) if adopt is not None else None,
    )
    with ExitStack() as on_error:
        for slot, (sock, _) in connections.items():
            on_error.enter_context(sock)
            _tune(sock, slot.channel, settings.peer_timeout_ns)
        on_error.pop_all()
    wiring = Wiring(topology, plan.cores.bit_count(), {}, {}, plan.address)
    for slot in sorted(connections):
        sock, keys = connections[slot]
        if slot.channel is Channel.CONTROL:
            wiring.controls[slot.peer] = Wire(sock.detach(), keys)
        else:
            wiring.data.setdefault(slot.peer, []).append(Wire(sock.detach(), keys))
    if adopt is not None:
        adopt(wiring.take_controls())
    return wiring


def _usable_cores() -> int:
    """Return the cores on which this process may run, as bits of a number."""
    return sum(1 << core for core in usable_core_numbers())


@dataclass(frozen=True)
class RankRecord:
    """The facts about a rank that it sends to all others.

    `key`: of its host. `address`: where it listens for other hosts, or on which address it will. `cores`: the cores on
    which it may run, as bits of a number. `alike`: the values that must be equal, by name.
    """

    key: str
    name: str
    unix: str
    address: str
    cores: Annotated[int, range(1, 1 << 4096)]
    alike: Mapping[str, str]

    @classmethod
    def of(cls, rank: str, settings: Settings, address: str, size: int | None = None) -> RankRecord:
        """Return the record of this process. `rank`: a text that no other one has. `size`: None: not known yet."""
        key = host_identity(settings.host_id)
        sizes = {} if size is None else {"size": size}
        return cls(
            key=f"{key}/{rank}" if settings.transport == "tcp" else key,
            name=host_name(),
            unix=f"unix:@ronde-{os.urandom(8).hex()}",
            address=address,
            cores=_usable_cores(),
            alike=as_texts(sizes | {name: getattr(settings, name) for name in MUST_AGREE}),
        )

    def encode(self) -> bytes:
        """Return the version of the protocol, followed by the record."""
        return b"%d " % PROTOCOL_VERSION + _RECORD.encode(self)

    @classmethod
    def decode(cls, payload: bytes, rank: int) -> RankRecord:
        """Return the record of a rank. Raises VersionError or ProtocolError."""
        version, _, text = payload.partition(b" ")
        if version.isdigit() and version != b"%d" % PROTOCOL_VERSION:
            raise VersionError(
                f"rank {rank} speaks version {version[:20].decode()} of Ronde's protocol, this one "
                f"{PROTOCOL_VERSION}; install the same Ronde everywhere"
            )
        if len(payload) > RECORD_LIMIT_BYTES:
            raise _malformed(rank)
        try:
            return _RECORD.decode(text)
        except ProtocolError:
            raise _malformed(rank) from None


_RECORD: TypedJson[RankRecord] = TypedJson(RankRecord, "start-up record")


@dataclass(frozen=True)
class _Plan:
    """The hosts of all ranks, and where they listen; `targets`: the address of each rank to which this one connects."""

    topology: Topology
    cores: int  # of my host's ranks together, as bits
    targets: list[Address]
    listeners: list[socket.socket]
    address: str = ""  # offered to other hosts


def _agree(mine: RankRecord, rank: int, exchange: Exchange, listeners: ExitStack) -> _Plan:
    """Do step 1. The sockets that listen belong to `listeners`."""
    unix, _ = listen(parse_address(mine.unix))
    listeners.enter_context(unix)
    received = exchange(mine.encode())
    records = [RankRecord.decode(payload, peer) for peer, payload in enumerate(received)]
    check_equal([record.alike for record in records])
    topology = topology_of(rank, records)
    cores = functools.reduce(operator.or_, (records[each].cores for each in topology.local_ranks))
    targets = [_address_from(peer, record.unix.encode()) for peer, record in enumerate(records)]
    if topology.local_size == topology.size:
        return _Plan(topology, cores, targets, [unix])
    offered = _address_for_other_hosts(mine, records)
    tcp, tcp_address = listen(Address(host=offered))
    listeners.enter_context(tcp)
    tcp_targets = [_address_from(*each) for each in enumerate(exchange(str(tcp_address).encode()))]
    for peer in range(topology.size):
        if not topology.is_local(peer):
            targets[peer] = tcp_targets[peer]
    return _Plan(topology, cores, targets, [unix, tcp], offered)


def _address_from(peer: int, received: bytes) -> Address:
    try:
        return parse_address(received.decode())
    except ValueError:
        raise _malformed(peer) from None


def _malformed(rank: int) -> ProtocolError:
    return ProtocolError(f"the start-up record of rank {rank} is malformed")


def _address_for_other_hosts(mine: RankRecord, records: list[RankRecord]) -> str:
    """Return the address on which to listen for other hosts.

    The host of the store may reach it by an address that other hosts cannot reach (127.0.1.1, to which some systems
    resolve their own name). Then it is the address of the interface that leads to the other hosts.
    """
    others = [record.address for record in records if not is_loopback(record.address)]
    return address_towards(others[0]) if others and is_loopback(mine.address) else mine.address


def _slots(plan: _Plan, tcp_streams: int, has_controls: bool) -> tuple[dict[Slot, Address], list[Slot]]:
    """Return the connections that this rank opens, and those that it accepts."""
    topology = plan.topology
    outgoing: dict[Slot, Address] = {}
    incoming: list[Slot] = []
    for peer in range(topology.size):
        slots = [Slot(peer, Channel.CONTROL)] if has_controls else []
        if not topology.is_local(peer):
            slots += [Slot(peer, Channel.DATA, stream) for stream in range(tcp_streams)]
        if peer < topology.rank:
            outgoing.update((slot, plan.targets[peer]) for slot in slots)
        elif peer > topology.rank:
            incoming += slots
    return outgoing, incoming


def _tune(sock: socket.socket, channel: Channel, peer_timeout_ns: int) -> None:
    """Prepare a connection for its channel.

    Control connections, which are mostly idle, detect an unreachable host by silence. On a data connection,
    TCP_USER_TIMEOUT would mistake a stopped peer with a full window for a dead one. It has keepalive for messages that
    are still on their way when their sender has shut down: then the control connection tells no more about the host.
    """
    if sock.family == socket.AF_UNIX:
        return
    is_control = channel is Channel.CONTROL
    idle_s = KEEPALIVE_IDLE_S if is_control else min(-(-peer_timeout_ns // 10**9), LONGEST_KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    if is_control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, peer_timeout_ns // 10**6)
