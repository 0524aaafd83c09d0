"""The TCP store when connections break and servers die: every operation that returns was done once, no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.conformance.cutting_relay import CuttingRelay

from ronde.errors import AuthenticationError, PeerLostError, TimeoutError, UsageError
from ronde.net.addresses import parse_address
from ronde.settings import JobKey
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient

SECOND = 10**9
LONG = 30 * SECOND
KEY = JobKey.generate()


class Place:
    """Where a store is served, again and again from one journal."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        self.server = StoreServer("tcp:127.0.0.1:0", KEY, journal=self.journal)
        self.address = self.server.address

    def target(self) -> tuple[str, int]:
        address = parse_address(self.address)
        return address.host, address.port

    def stop(self) -> None:
        self.server.close()

    def start(self) -> None:
        self.server = StoreServer(self.address, KEY, journal=self.journal)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.stop()


def in_threads(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def change_things(address: str, name: int, rounds: int) -> None:
    """Do every operation that must not be done twice, and check the answers."""
    store = StoreClient(address, KEY, LONG, patience_ns=LONG)
    for count in range(1, rounds + 1):
        assert store.add(f"own {name}", 1) == count
        store.add("all", 1)
        store.append("log", b"%d.%d " % (name, count))
        store.queue_push("queue", b"%d.%d" % (name, count))
        assert store.compare_set(
            f"chain {name}", b"%d" % (count - 1) if count > 1 else b"", b"%d" % count
        ) == (b"%d" % count)
        store.set("to delete", b"")
        store.multi_set({f"many {name}": b"%d" % count, "last": b""})
        assert store.multi_get([f"many {name}", f"own {name}"], LONG) == [b"%d" % count] * 2
    store.close()


def take_all(address: str, count: int, taken: list[bytes]) -> None:
    store = StoreClient(address, KEY, LONG, patience_ns=LONG)
    taken.extend(store.queue_pop("queue", LONG) for _ in range(count))
    store.close()


def check_things(place: Place, clients: int, rounds: int, taken: list[bytes]) -> None:
    tokens = [b"%d.%d" % (name, count) for name in range(clients) for count in range(1, rounds + 1)]
    store = StoreClient(place.address, KEY, LONG)
    assert store.get("all", 0) == b"%d" % len(tokens)
    assert sorted(store.get("log", 0).split()) == sorted(tokens)
    assert sorted(taken) == sorted(tokens)
    assert store.queue_len("queue") == 0
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
@pytest.mark.parametrize("restarts", [False, True], ids=["connections", "servers"])
def test_nothing_is_done_twice_whatever_breaks(place: Place, seed: int, restarts: bool) -> None:
    clients, rounds, taken = 3, 25, list[bytes]()
    over = threading.Event()

    def restart() -> None:
        while restarts and not over.wait(0.02):
            place.stop()
            place.start()

    with closing(CuttingRelay(place.target, seed, most=1200)) as relay:

        def work() -> None:
            works = [lambda name=name: change_things(relay.address, name, rounds) for name in range(clients)]
            try:
                in_threads(*works, lambda: take_all(relay.address, clients * rounds, taken))
            finally:
                over.set()

        in_threads(work, restart)
        assert relay.cuts > 20
    check_things(place, clients, rounds, taken)


def test_a_wait_goes_on_behind_the_break(place: Place) -> None:
    store, seen = StoreClient(place.address, KEY, LONG), list[object]()
    waiter, watcher = store.fork(), store.fork()

    def stop_and_start() -> None:
        time.sleep(0.1)  # so that the others wait, most likely
        place.stop()
        place.start()
        store.set("key", b"value")

    in_threads(
        lambda: seen.append(waiter.get("key", LONG)),
        lambda: seen.append(watcher.watch({"key": None}, LONG)),
        stop_and_start,
    )
    assert b"value" in seen
    assert {"key": b"value"} in seen
    for client in (store, waiter, watcher):
        client.close()


def test_a_wait_that_breaks_still_ends_in_time(place: Place) -> None:
    with closing(CuttingRelay(place.target, 1, most=600)) as relay:
        store = StoreClient(relay.address, KEY, LONG)
        for _ in range(5):
            with pytest.raises(TimeoutError, match=r"waited 0\.1 s for 'never'"):
                store.get("never", SECOND // 10)
        store.close()


def test_what_is_held_is_held_again(place: Place) -> None:
    store = StoreClient(place.address, KEY, LONG)
    watcher = store.fork()
    store.hold("alive", b"1")
    store.hold("alive too", b"2")
    store.hold("not for long", b"3")
    assert store.delete_key("not for long")
    place.stop()
    place.start()
    # The holder has not come back yet, and a held key is in no journal.
    assert watcher.check(["alive"]) is False
    store.set("any", b"")
    assert watcher.multi_get(["alive", "alive too"], 0) == [b"1", b"2"]
    assert not watcher.check(["not for long"])
    store.close()
    assert watcher.watch({"alive": b"1"}, LONG) == {"alive": None}
    watcher.close()


def test_a_client_that_comes_back_at_once_was_never_away(place: Place) -> None:
    """The server need not have noticed that the old connection is broken when the new one comes."""
    store, watcher = StoreClient(place.address, KEY, LONG), StoreClient(place.address, KEY, LONG)
    store.hold("alive", b"1")
    old, store._sock, store._fd = store._sock, None, -1
    assert store.add("count", 1) == 1
    assert watcher.get("alive", 0) == b"1"
    assert old is not None
    assert old.recv(1) == b""
    old.close()
    store.close()
    assert watcher.watch({"alive": b"1"}, LONG) == {"alive": None}
    watcher.close()


def test_patience_has_an_end(place: Place) -> None:
    store = StoreClient(place.address, KEY, LONG, patience_ns=SECOND // 10)
    place.stop()
    for _ in range(2):
        with pytest.raises(
            PeerLostError, match=rf"lost the store at {place.address}: .*waited 0.1 s for .* refused"
        ):
            store.set("key", b"")
    place.start()
    store.close()


def test_another_job_in_its_place_is_no_way_back(place: Place) -> None:
    store = StoreClient(place.address, KEY, LONG)
    place.stop()
    other = StoreServer(place.address, JobKey.generate())
    with pytest.raises(AuthenticationError, match="job key"):
        store.set("key", b"")
    other.close()
    place.start()
    store.close()


def test_it_goes_on_elsewhere_from_a_copy_of_the_journal(place: Place, tmp_path: Path) -> None:
    port = place.target()[1]
    there = f"tcp:127.0.0.2:{port}"
    store = StoreClient(f"{place.address},{there}", KEY, LONG)
    store.set("key", b"value")
    store.queue_push("queue", b"1")
    assert store.add("count", 1) == 1
    place.stop()
    (tmp_path / "copy").write_bytes(place.journal.read_bytes())
    server = StoreServer(there, KEY, journal=tmp_path / "new", seed=tmp_path / "copy")
    assert store.add("count", 1) == 2
    assert (store.get("key", 0), store.queue_pop("queue", 0)) == (b"value", b"1")
    server.close()
    with pytest.raises(UsageError, match="is not empty, but --seed needs a new one"):
        StoreServer(there, KEY, journal=tmp_path / "new", seed=tmp_path / "copy")
    server = StoreServer(there, KEY, journal=tmp_path / "new")
    assert store.get("count", 0) == b"2"
    store.close()
    server.close()
    place.start()


def test_close_wakes_a_waiting_thread(place: Place) -> None:
    store, told = StoreClient(place.address, KEY, LONG), list[str]()

    def wait() -> None:
        try:
            store.get("never", LONG)
        except UsageError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    store.close()
    thread.join()
    assert told == [f"the connection to the store at {place.address} has been closed"]
