"""What every store must do. A new store is done when it passes this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ronde.errors import TimeoutError, UsageError
from ronde.net.stores.base import KEY_LIMIT_BYTES, VALUE_LIMIT_BYTES, Store
from ronde.net.stores.memory import MemoryStore
from ronde.net.stores.tcp import StoreClient, StoreServer
from ronde.settings import JobKey

SECOND = 10**9
LONG = 30 * SECOND

Connect = Callable[[], Store]


def memory() -> Iterator[Connect]:
    store = MemoryStore()
    yield lambda: store


def served_at(address: str) -> Iterator[Connect]:
    key = JobKey.generate()
    server = StoreServer(address, key)
    clients: list[StoreClient] = []

    def connect() -> Store:
        clients.append(StoreClient(server.address, key, LONG))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    server.close()


def torch() -> Iterator[Connect]:
    from torch.distributed import TCPStore

    from ronde.net.stores.torch import TorchStore

    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    clients: list[TorchStore] = []

    def connect() -> Store:
        clients.append(TorchStore("127.0.0.1", servers[0].port, "ronde", LONG))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    servers.clear()  # torch's server ends with its last reference


@pytest.fixture(scope="module", params=["memory", "unix", "unix-path", "tcp", "tcp6", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of store. The first store of torch opens files that stay open as long as the process."""
    if request.param == "torch":
        pytest.importorskip("torch.distributed")
        for _ in torch():
            pass
    return str(request.param)


@pytest.fixture
def connect(kind: str, tmp_path: Path) -> Iterator[Connect]:
    """Return a function that opens the same store once more."""
    stores = {
        "memory": memory,
        "unix": lambda: served_at(f"unix:@ronde-test-{JobKey.generate().hex()[:16]}"),
        "unix-path": lambda: served_at(f"unix:{tmp_path}/store"),
        "tcp": lambda: served_at("tcp:127.0.0.1:0"),
        "tcp6": lambda: served_at("tcp:[::1]:0"),
        "torch": torch,
    }
    yield from stores[kind]()


@pytest.fixture
def store(connect: Connect) -> Store:
    return connect()


@pytest.mark.parametrize("value", [b"", b"x", b"\0\xff\n", b"v" * VALUE_LIMIT_BYTES], ids=len)
def test_get_returns_what_was_set(store: Store, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key", 0) == value


def test_the_last_set_counts(store: Store) -> None:
    store.set("key", b"first")
    store.set("key", b"second")
    assert store.get("key", LONG) == b"second"


def test_keys_may_be_long_and_of_any_script(store: Store) -> None:
    long_key = "k" * KEY_LIMIT_BYTES
    store.set(long_key, b"long")
    store.set("Schlüssel/鍵", b"script")
    assert store.get(long_key, 0) == b"long"
    assert store.get("Schlüssel/鍵", 0) == b"script"


@pytest.mark.parametrize("key", ["", "k" * (KEY_LIMIT_BYTES + 1)], ids=len)
def test_a_key_outside_the_limits_is_refused(store: Store, key: str) -> None:
    for call in (
        lambda: store.set(key, b""),
        lambda: store.get(key, 0),
        lambda: store.wait([key], 0),
        lambda: store.add(key, 1),
        lambda: store.compare_set(key, b"", b""),
        lambda: store.delete_key(key),
    ):
        with pytest.raises(UsageError, match="1 to 1024 bytes"):
            call()


def test_a_value_above_the_limit_is_refused_and_the_store_goes_on(store: Store) -> None:
    with pytest.raises(UsageError, match="at most 1048576 bytes"):
        store.set("key", b"v" * (VALUE_LIMIT_BYTES + 1))
    store.set("key", b"v")
    assert store.get("key", 0) == b"v"


@pytest.mark.parametrize("timeout_ns", [0, SECOND // 20])
def test_get_and_wait_give_up_and_the_store_goes_on(store: Store, timeout_ns: int) -> None:
    with pytest.raises(TimeoutError, match="'absent'") as caught:
        store.get("absent", timeout_ns)
    assert caught.value.waited_ns == timeout_ns
    with pytest.raises(TimeoutError):
        store.wait(["absent"], timeout_ns)
    store.set("absent", b"here")
    store.wait(["absent"], timeout_ns)
    assert store.get("absent", timeout_ns) == b"here"


def test_wait_wants_all_keys(store: Store) -> None:
    store.wait([], 0)
    store.set("a", b"1")
    with pytest.raises(TimeoutError):
        store.wait(["a", "b"], 0)
    store.set("b", b"2")
    store.wait(["a", "b"], 0)


@pytest.mark.parametrize(
    "appear",
    [
        lambda store: store.set("key", b"7"),
        lambda store: store.add("key", 7),
        lambda store: store.compare_set("key", b"", b"7"),
    ],
    ids=["set", "add", "compare_set"],
)
def test_waiters_wake_whatever_brings_the_key(connect: Connect, appear: Callable[[Store], object]) -> None:
    setter, started, values = connect(), threading.Barrier(4), []

    def waiter() -> None:
        store = connect()
        started.wait()
        store.wait(["key"], LONG)
        values.append(store.get("key", LONG))

    threads = [threading.Thread(target=waiter) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    appear(setter)
    for thread in threads:
        thread.join()
    assert values == [b"7"] * 3


def test_add_counts_from_zero_and_below(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.add("n", 0) == -2
    assert store.get("n", 0) == b"-2"


def test_add_is_atomic(connect: Connect) -> None:
    def count() -> None:
        store = connect()
        seen.extend(store.add("n", 1) for _ in range(50))

    seen: list[int] = []
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 201))


def test_add_goes_on_from_a_number_that_was_set(store: Store) -> None:
    store.set("n", b"40")
    assert store.add("n", 2) == 42


def test_compare_set_sets_only_what_was_expected(store: Store) -> None:
    assert store.compare_set("key", b"other", b"new") == b""
    with pytest.raises(TimeoutError):
        store.get("key", 0)
    assert store.compare_set("key", b"", b"first") == b"first"
    assert store.compare_set("key", b"other", b"second") == b"first"
    assert store.compare_set("key", b"first", b"\0\xff") == b"\0\xff"
    assert store.get("key", 0) == b"\0\xff"


def test_delete_key_says_whether_it_was_there(store: Store) -> None:
    assert not store.delete_key("key")
    store.set("key", b"")
    assert store.delete_key("key")
    assert not store.delete_key("key")
    with pytest.raises(TimeoutError):
        store.get("key", 0)


def test_all_clients_see_one_store(connect: Connect) -> None:
    one, other = connect(), connect()
    one.set("key", b"value")
    assert other.get("key", LONG) == b"value"
    assert one.address == other.address


def test_close_may_be_repeated(store: Store) -> None:
    store.close()
    store.close()
