"""Ranks that are threads wire themselves with real sockets, through a store in memory."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ronde.comm.bootstrap import (
    NativeWire,
    RankRecord,
    Wire,
    Wiring,
    topology_of,
    wire,
    wire_again,
    wire_known,
)
from ronde.comm.byte_exchange import Exchange, exchange_among
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.comm.world_attempt import WorldAttempt
from ronde.errors import AuthenticationError, MismatchError, PeerLostError, ProtocolError, TimeoutError
from ronde.net.addresses import Address, listen, parse_address
from ronde.settings import JobKey, Settings
from ronde.stores.memory import MemoryStore

SECOND = 10**9
KEY = JobKey.generate()


def deadline_in(duration_ns: int) -> int:
    return time.monotonic_ns() + duration_ns


def exchange_through(store: MemoryStore, rank: int, size: int, timeout_ns: int) -> Exchange:
    """Return the exchange of a first attempt to form a world."""
    return WorldAttempt(store, rank, size, time.monotonic_ns(), deadline_in(timeout_ns)).exchange


def in_threads(size: int, body: Callable[[int], object]) -> list[object]:
    """Return what each rank's body returned or raised."""
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Job:
    """A number of ranks; `overrides` has settings of single ranks, `absent` ranks never come."""

    def __init__(self, size: int, absent: tuple[int, ...] = (), **settings: object) -> None:
        self.size = size
        self.absent = absent
        self.store = MemoryStore()
        self.settings = {"start_timeout_ns": 60 * SECOND, **settings}
        self.overrides: dict[int, dict[str, object]] = {}
        self.keys: dict[int, JobKey] = {}

    def wire(self, rank: int) -> Wiring | None:
        if rank in self.absent:
            return None
        settings = Settings(**{**self.settings, **self.overrides.get(rank, {})})  # type: ignore[arg-type]
        exchange = exchange_through(self.store, rank, self.size, settings.start_timeout_ns)
        return wire(
            rank,
            self.size,
            exchange,
            settings,
            self.keys.get(rank, KEY),
            "world/1",
            deadline_in(settings.start_timeout_ns),
        )

    def run(self) -> list[object]:
        return in_threads(self.size, self.wire)

    def wirings(self) -> list[Wiring]:
        results = self.run()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [result for result in results if isinstance(result, Wiring)]


@contextmanager
def closing(wirings: list[Wiring]) -> Iterator[list[Wiring]]:
    try:
        yield wirings
    finally:
        for wiring in wirings:
            wiring.close()


def check_connected(here: Wire, there: Wire) -> None:
    """The two are the ends of one connection, and do not block; they have keys for it unless it is a Unix socket."""
    one, other = here.descriptor, there.descriptor
    assert not os.get_blocking(one)
    assert not os.get_blocking(other)
    with socket.socket(fileno=os.dup(one)) as left, socket.socket(fileno=os.dup(other)) as right:
        if left.family == socket.AF_UNIX:
            assert here.keys is there.keys is None
        else:
            assert here.keys
            assert there.keys
            assert (here.keys.outgoing, here.keys.incoming) == (there.keys.incoming, there.keys.outgoing)
        right.settimeout(30)
        left.send(b"ping")
        assert right.recv(16) == b"ping"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda mine: b"",
        lambda mine: b"[" * 100_000,
        lambda mine: mine.replace(b"]", b"}", 1),
        lambda mine: mine.replace(b" ", b" [0,", 1).replace(b"]]]", b"]]]]"),
        lambda mine: mine.replace(b'"unix:@', b'"unix@'),
        lambda mine: mine.replace(b'"unix:@', b'"unix:@' + b"a" * 200),
    ],
    ids=["empty", "deep", "not JSON", "nested", "not an address", "too long an address"],
)
def test_a_malformed_record_names_its_rank(spoil: Callable[[bytes], bytes]) -> None:
    def exchange(mine: bytes) -> list[bytes]:
        return [mine, spoil(mine)]

    with pytest.raises(ProtocolError, match="the start-up record of rank 1 is malformed"):
        wire(0, 2, exchange, Settings(), KEY, "world/1", deadline_in(60 * SECOND))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranks_of_one_host(size: int) -> None:
    with closing(Job(size).wirings()) as wirings:
        for rank, wiring in enumerate(wirings):
            topology = wiring.topology
            assert (topology.rank, topology.size, topology.local_size) == (rank, size, size)
            assert set(wiring.controls) == set(range(size)) - {rank}
            assert wiring.data == {}
        for high in range(size):
            for low in range(high):
                check_connected(wirings[high].controls[low], wirings[low].controls[high])


def test_every_connection_between_hosts_notices_a_host_that_vanishes() -> None:
    """Without TCP_USER_TIMEOUT on a data connection: a stopped peer with a full window has not vanished."""

    def options(wire: Wire) -> tuple[int, ...]:
        with socket.socket(fileno=os.dup(wire.descriptor)) as sock:
            return (
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )

    with closing(Job(2, transport="tcp", peer_timeout_ns=7 * SECOND).wirings()) as wirings:
        for here, there in ((0, 1), (1, 0)):
            assert options(wirings[here].controls[there]) == (1, 2, 7000)
            for wired in wirings[here].data[there]:
                assert options(wired) == (1, 7, 0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_are_each_their_own_host(size: int) -> None:
    with closing(Job(size, transport="tcp", tcp_streams=3).wirings()) as wirings:
        for rank, wiring in enumerate(wirings):
            topology = wiring.topology
            assert (topology.local_rank, topology.local_size) == (0, 1)
            assert (topology.cross_rank, topology.cross_size) == (rank, size)
            assert {peer: len(streams) for peer, streams in wiring.data.items()} == {
                peer: 3 for peer in range(size) if peer != rank
            }
        for high in range(size):
            for low in range(high):
                check_connected(wirings[high].controls[low], wirings[low].controls[high])
                for one, other in zip(wirings[high].data[low], wirings[low].data[high]):
                    check_connected(one, other)


def test_two_hosts() -> None:
    job = Job(5)
    for rank in range(5):
        job.overrides[rank] = {"host_id": f"host {rank % 2}"}
    with closing(job.wirings()) as wirings:
        assert [wiring.topology.local_ranks for wiring in wirings] == [(0, 2, 4), (1, 3)] * 2 + [(0, 2, 4)]
        assert [wiring.topology.host_of for wiring in wirings] == [(0, 1, 0, 1, 0)] * 5
        assert [sorted(wiring.data) for wiring in wirings] == [[1, 3], [0, 2, 4], [1, 3], [0, 2, 4], [1, 3]]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_never_comes_is_named(transport: str) -> None:
    results = Job(4, absent=(1, 3), transport=transport, start_timeout_ns=SECOND).run()
    for error in (results[0], results[2]):
        assert isinstance(error, TimeoutError)
        waited, told = re.fullmatch(r"waited ([\d.]+) s for (.*)", str(error)).groups()  # type: ignore[union-attr]
        assert float(waited) >= 1  # it says how long it has waited, on a loaded machine longer than it should
        assert told == (
            "ranks 1, 3 of 4 to join at memory; every rank must call ronde.init() within that time "
            "(RONDE_START_TIMEOUT)"
        )
        assert error.missing == (1, 3)
        assert error.operation == "init"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_with_another_key_is_turned_away(transport: str) -> None:
    job = Job(2, transport=transport, start_timeout_ns=2 * SECOND)
    job.keys[1] = JobKey.generate()
    first, second = job.run()
    assert isinstance(second, AuthenticationError)
    assert "rank 0 on " in str(second)
    assert "job key" in str(second)
    assert isinstance(first, TimeoutError)
    assert first.missing == (1,)
    assert "for rank 1 of 2 to connect; this rank turned away a connection from " in str(first)
    assert str(first).endswith("does not know the job key (RONDE_JOB_KEY) of this job")


@pytest.mark.parametrize(
    ("name", "values"),
    [("tcp_streams", (2, 4)), ("staging_bytes", (4096, 8192)), ("allreduce_algorithm", ("ring", "direct"))],
)
def test_settings_that_must_agree(name: str, values: tuple[object, object]) -> None:
    job = Job(2)
    job.overrides = {rank: {name: values[rank]} for rank in range(2)}
    for error in job.run():
        assert isinstance(error, MismatchError)
        message = (
            f"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1: it must be the same on all ranks"
        )
        assert str(error) == message


class CountingStore(MemoryStore):
    """Counts the bytes of the values that it gives."""

    given = 0

    def get(self, key: str, timeout_ns: int) -> bytes:
        value = super().get(key, timeout_ns)
        self.given += len(value)
        return value

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        values = super().multi_get(keys, timeout_ns)
        self.given += sum(map(len, values))
        return values


def test_a_store_gives_each_rank_all_records_as_one_small_value() -> None:
    size, record = 64, b"of a rank, like those of all others " * 10
    store = CountingStore()

    def body(rank: int) -> list[bytes]:
        return exchange_through(store, rank, size, 60 * SECOND)(b"%d %s" % (rank, record))

    for told in in_threads(size, body):
        assert told == [b"%d %s" % (rank, record) for rank in range(size)]
    assert store.given < size * len(record) * size / 10


def test_collected_records_that_are_malformed() -> None:
    for packed in (
        b"",
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(bytes(1 << 20)),
        zlib.compress(b"\xff" * 20),
    ):
        store = MemoryStore()
        store.set("world 2/epoch", b"word-0")
        store.set("world 2/word-0/0/outcome", b"records " + packed)
        with pytest.raises(ProtocolError, match="the start-up records of the ranks are malformed"):
            exchange_through(store, 1, 2, SECOND)(b"mine")


def test_a_peer_that_gives_up_is_noticed_before_the_deadline() -> None:
    """Rank 1 calls rank 0 and dies; rank 2 never calls."""
    job = Job(3)
    told = threading.Event()

    def body(rank: int) -> object:
        limit_ns = 60 * SECOND
        exchange = exchange_through(job.store, rank, 3, limit_ns)
        if rank == 2:
            exchange(record_of(rank))
            told.wait()
            return None
        if rank == 1:
            limit_ns = 2 * SECOND
        try:
            return wire(rank, 3, exchange, Settings(), KEY, "w", deadline_in(limit_ns))
        finally:
            told.set()

    def record_of(rank: int) -> bytes:
        epoch = job.store.get("world 3/epoch", 0).decode()
        own = job.store.get(f"world 3/{epoch}/0/0", 60 * SECOND)
        return own.replace(b"unix:@ronde-", b"unix:@ronde-other-")

    first, second, _ = in_threads(3, body)
    assert isinstance(second, TimeoutError)
    assert isinstance(first, PeerLostError)
    assert first.rank == 1


def test_connections_and_shared_memory_have_one_deadline() -> None:
    """Rank 0 connects and shares no memory; the limit of the settings does not begin again for that."""
    store = MemoryStore()
    is_over = threading.Event()

    def body(rank: int) -> object:
        exchange = exchange_through(store, rank, 2, 60 * SECOND)
        if rank == 0:
            with closing([wire(0, 2, exchange, Settings(), KEY, "w", deadline_in(60 * SECOND))]):
                is_over.wait()
            return None
        try:
            return CommunicatorFactory(Settings(), KEY).make_world(1, 2, exchange, "w", deadline_in(SECOND))
        finally:
            is_over.set()

    error = in_threads(2, body)[1]
    assert isinstance(error, TimeoutError)
    assert "for shared memory from rank 0" in str(error)


def test_communicators_of_the_world_have_its_deadline() -> None:
    """Rank 0 meets for another communicator, and does not connect it; the limit does not begin again for that."""
    store = MemoryStore()
    is_over = threading.Event()

    def body(rank: int) -> object:
        exchange = exchange_through(store, rank, 2, 60 * SECOND)
        factory = CommunicatorFactory(Settings(), KEY)
        world = factory.make_world(rank, 2, exchange, "w", deadline_in(60 * SECOND))
        try:
            if rank == 1:
                with world.connecting_by(deadline_in(SECOND)):
                    return world.duplicate()
            meet, until_ns = exchange_among(world, [0, 1]), deadline_in(60 * SECOND)
            wire_again(world.topology, meet, Settings(), KEY, "w / 1 of 0,1", until_ns, "", lambda: None)
            is_over.wait()
            return None
        finally:
            is_over.set()
            world.shutdown()

    error = in_threads(2, body)[1]
    assert isinstance(error, TimeoutError)
    assert "for shared memory from rank 0" in str(error)


def unix_listeners() -> set[str]:
    """Names of the abstract sockets of Ronde that listen now."""
    rows = Path("/proc/net/unix").read_text().splitlines()
    return {row.split()[-1] for row in rows if "@ronde-" in row and row.split()[3] == "00010000"}


@pytest.mark.alone  # it counts the abstract sockets
def test_strangers_disturb_nobody() -> None:
    """Some hang up, some say nothing, some talk nonsense, and there are more of them than are kept waiting."""
    job = Job(3)
    hold = threading.Event()
    strangers = []
    before = unix_listeners()

    def body(rank: int) -> object:
        if rank == 2:
            hold.wait()
        return job.wire(rank)

    def pester() -> None:
        while len(names := unix_listeners() - before) < 2:
            time.sleep(0.001)
        for name in names:
            for number in range(400):
                stranger = socket.socket(socket.AF_UNIX)
                stranger.settimeout(30)
                stranger.connect("\0" + name[1:])
                if number % 3 == 0:
                    stranger.close()
                    continue
                if number % 3 == 1:
                    stranger.send(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
                strangers.append(stranger)
        hold.set()

    nuisance = threading.Thread(target=pester)
    nuisance.start()
    results = in_threads(3, body)
    nuisance.join()
    for stranger in strangers:
        stranger.close()
    wirings = [result for result in results if isinstance(result, Wiring)]
    with closing(wirings):
        assert len(wirings) == 3, results


def test_many_times_in_a_row() -> None:
    for _ in range(50):
        with closing(Job(2).wirings()) as wirings:
            assert len(wirings) == 2


# Ranks that know the records of all


class Listening:
    """Ranks that listen before there is a world."""

    def __init__(self, size: int) -> None:
        self.records, self.listeners = [], []
        for rank in range(size):
            tcp, address = listen(Address(host="127.0.0.1"))
            self.records.append(RankRecord.of(str(rank), Settings(), str(address)))
            unix, _ = listen(parse_address(self.records[rank].unix))
            self.listeners.append([tcp, unix])

    def wire(self, rank: int, world: str, limit_ns: int = 60 * SECOND) -> dict[int, NativeWire]:
        """Return the control connections that the rank has got."""
        adopted: dict[int, NativeWire] = {}
        wiring = wire_known(
            *(topology_of(rank, self.records), self.records, self.listeners[rank], Settings(), KEY, world),
            *(deadline_in(limit_ns), world.encode().ljust(8)),
            adopt=adopted.update,
            check=lambda: None,
            data_streams=1,
        )
        assert not wiring.controls
        return adopted

    def close(self) -> None:
        for listener in [each for several in self.listeners for each in several]:
            listener.close()


@pytest.fixture
def three_listening() -> Iterator[Listening]:
    ranks = Listening(3)
    yield ranks
    ranks.close()


def close_all(adopted: Sequence[object]) -> None:
    for controls in adopted:
        assert isinstance(controls, dict), controls
        for descriptor, *_ in controls.values():
            os.close(descriptor)


def test_ranks_that_know_all_records_connect_in_one_world_after_the_other(three_listening: Listening) -> None:
    for world in ("first", "second"):
        adopted = in_threads(3, lambda rank, world=world: three_listening.wire(rank, world))  # type: ignore[misc]
        assert [sorted(each) for each in adopted if isinstance(each, dict)] == [[1, 2], [0, 2], [0, 1]]
        close_all(adopted)


def test_a_rank_that_is_still_in_another_world_is_called_again(three_listening: Listening) -> None:
    left = threading.Event()

    def body(rank: int) -> object:
        if rank == 0:
            with pytest.raises(TimeoutError) as caught:
                three_listening.wire(0, "old", SECOND // 5)
            left.set()
            assert caught.value.missing == (1, 2)
        return three_listening.wire(rank, "new")

    adopted = in_threads(3, body)
    assert left.is_set()
    close_all(adopted)


def test_a_missing_rank_that_listens_no_more_is_lost(three_listening: Listening) -> None:
    for listener in three_listening.listeners[2]:
        listener.close()
    with pytest.raises(PeerLostError, match=r"rank 2 on .* has ended") as caught:
        three_listening.wire(0, "world")
    assert caught.value.rank == 2
