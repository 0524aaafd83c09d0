"""The operations of every store. A new store is done when it passes this and all other test_store_* files here."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.conformance.store_kinds import IN_ONE_PROCESS, ONLY_BOOTSTRAP
from tests.conformance.store_processes import LONG, SECOND

from ronde.errors import TimeoutError, UsageError
from ronde.stores.store import KEY_LIMIT_BYTES, VALUE_LIMIT_BYTES, Store

Connect = Callable[[], Store]


@pytest.mark.parametrize("value", [b"", b"x", b"\0\xff\n", b"v" * VALUE_LIMIT_BYTES], ids=len)
def test_get_returns_what_was_set(store: Store, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key", 0) == value


def test_the_last_set_counts(store: Store) -> None:
    store.set("key", b"first")
    store.set("key", b"second")
    assert store.get("key", LONG) == b"second"


def test_keys_may_be_long_and_of_any_script(store: Store) -> None:
    long_key = "k" * (KEY_LIMIT_BYTES - len("job/round 1/"))
    for key in (long_key, "Schlüssel/鍵", "a\nb c%20", "a/", "/a", "a"):
        store.set(key, key.encode())
    for key in (long_key, "Schlüssel/鍵", "a\nb c%20", "a/", "/a", "a"):
        assert store.get(key, 0) == key.encode()


@pytest.mark.parametrize("key", ["", "k" * (KEY_LIMIT_BYTES + 1)], ids=len)
def test_a_key_outside_the_limits_is_refused(kind: str, store: Store, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.set(key, b""),
        lambda: store.get(key, 0),
        lambda: store.wait([key], 0),
        lambda: store.add(key, 1),
        lambda: store.compare_set(key, b"", b""),
        lambda: store.delete_key(key),
        lambda: store.check([key]),
        lambda: store.append(key, b""),
        lambda: store.multi_get([key], 0),
        lambda: store.multi_set({key: b""}),
    ]
    if kind not in ONLY_BOOTSTRAP:
        calls += [
            lambda: store.queue_push(key, b""),
            lambda: store.queue_pop(key, 0),
            lambda: store.queue_len(key),
            lambda: store.watch({key: None}, 0),
            lambda: store.hold(key, b""),
        ]
        if key or not kind.startswith("prefix"):
            calls.append(lambda: store.delete_prefix(key))
    for call in calls:
        with pytest.raises(UsageError, match="1 to 1024 bytes"):
            call()


def test_a_value_above_the_limit_is_refused_and_the_store_goes_on(kind: str, store: Store) -> None:
    long = b"v" * (VALUE_LIMIT_BYTES + 1)
    calls: list[Callable[[], object]] = [
        lambda: store.set("key", long),
        lambda: store.compare_set("key", b"", long),
        lambda: store.compare_set("key", long, b""),
        lambda: store.append("key", long),
        lambda: store.multi_set({"other": b"", "key": long}),
    ]
    if kind not in ONLY_BOOTSTRAP:
        calls += [lambda: store.queue_push("key", long), lambda: store.hold("key", long)]
    for call in calls:
        with pytest.raises(UsageError, match="at most 1048576"):
            call()
    assert not store.check(["key"])
    assert not store.check(["other"])
    store.set("key", b"v")
    assert store.get("key", 0) == b"v"


def test_what_is_neither_text_nor_bytes_is_refused_and_harms_nothing(kind: str, store: Store) -> None:
    """As a script writes it that has used torch's stores, which take text for values."""
    text: Any = "text"
    calls: list[Callable[[], object]] = [
        lambda: store.set("key", text),
        lambda: store.compare_set("key", text, b""),
        lambda: store.compare_set("key", b"", text),
        lambda: store.append("key", text),
        lambda: store.multi_set({"key": text}),
    ]
    if kind not in ONLY_BOOTSTRAP:
        calls += [lambda: store.queue_push("key", text), lambda: store.hold("key", text)]
    for call in calls:
        with pytest.raises(UsageError, match=r"value is bytes; that of '.*key' is str"):
            call()
    for key in (b"key", "\udc80"):
        with pytest.raises(UsageError, match="key is text"):
            store.get(cast(Any, key), 0)
    for several in (
        lambda: store.wait(text, LONG),
        lambda: store.check(text),
        lambda: store.multi_get(text, 0),
    ):
        with pytest.raises(UsageError, match=r"write \['text'\]"):
            several()
    assert not store.check(["key"])
    store.set("key", cast(Any, bytearray(b"1")))
    assert store.compare_set("key", cast(Any, memoryview(b"1")), b"2") == b"2"


@pytest.mark.parametrize("timeout_ns", [0, SECOND // 20])
def test_get_and_wait_give_up_and_the_store_goes_on(store: Store, timeout_ns: int) -> None:
    with pytest.raises(TimeoutError, match="absent'") as caught:
        store.get("absent", timeout_ns)
    assert caught.value.waited_ns == timeout_ns
    with pytest.raises(TimeoutError):
        store.wait(["absent"], timeout_ns)
    store.set("absent", b"here")
    store.wait(["absent"], timeout_ns)
    assert store.get("absent", timeout_ns) == b"here"


@pytest.mark.parametrize("timeout_ns", [0, SECOND // 20])
def test_the_error_of_a_wait_names_only_missing_keys(store: Store, timeout_ns: int) -> None:
    store.multi_set({f"there {number}": b"" for number in range(5)})
    names = ["there 0", "absent 1", "there 1", "there 2", "absent 2", "there 3", "there 4"]
    for call in (store.wait, store.multi_get):
        with pytest.raises(TimeoutError) as caught:
            call(names, timeout_ns)
        assert "there" not in str(caught.value)
        assert re.search("for '.*absent 1', '.*absent 2' in the store at", str(caught.value))
        with pytest.raises(
            TimeoutError, match=r"for '[^,]*absent 0', '[^,]*', '[^,]*absent 2' and more in the store"
        ):
            call([f"absent {number}" for number in range(9)], timeout_ns)


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
        lambda store: store.append("key", b"7"),
        lambda store: store.multi_set({"other": b"", "key": b"7"}),
    ],
    ids=["set", "add", "compare_set", "append", "multi_set"],
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


def test_an_amount_has_at_most_40_digits(store: Store) -> None:
    for amount in (10**40, -(10**41)):
        with pytest.raises(UsageError, match=r"cannot add to .*n': the amount has more than 40 digits"):
            store.add("n", amount)
    assert store.add("n", 1) == 1


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


def test_add_refuses_what_is_no_number(kind: str, store: Store) -> None:
    if kind in ONLY_BOOTSTRAP:
        pytest.skip("torch hangs up")
    for value in (b"", b"x", b"1x", b" 1", b"+1", b"1.0"):
        store.set("n", value)
        with pytest.raises(UsageError, match="n': its value is not a number"):
            store.add("n", 1)
        assert store.get("n", 0) == value


def test_check_looks_at_all_keys_now(store: Store) -> None:
    assert store.check([])
    store.set("a", b"")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    store.set("b", b"")
    assert store.check(["a", "b"])
    store.delete_key("a")
    assert not store.check(["a", "b"])


def test_append_adds_to_the_end(connect: Connect) -> None:
    one, other = connect(), connect()
    one.append("key", b"a")
    other.append("key", b"\0\xff")
    one.append("key", b"")
    assert other.get("key", 0) == b"a\0\xff"


def test_append_refuses_what_gets_too_long(kind: str, store: Store) -> None:
    if kind in ONLY_BOOTSTRAP:
        pytest.skip("torch knows no limit")
    store.set("key", b"v" * (VALUE_LIMIT_BYTES - 2))
    with pytest.raises(UsageError, match="at most 1048576"):
        store.append("key", b"123")
    store.append("key", b"12")
    assert store.get("key", 0) == b"v" * (VALUE_LIMIT_BYTES - 2) + b"12"


def test_several_keys_at_once(store: Store) -> None:
    store.multi_set({})
    assert store.multi_get([], 0) == []
    values = {f"key {number}": b"%d" % number for number in range(100)}
    store.multi_set(values)
    assert store.multi_get(list(values), 0) == list(values.values())
    assert store.multi_get(["key 7", "key 3"], LONG) == [b"7", b"3"]
    with pytest.raises(TimeoutError, match="absent"):
        store.multi_get(["key 7", "absent"], 0)
    with pytest.raises(TimeoutError):
        store.multi_get(["key 7", "absent"], SECOND // 20)


def test_multi_set_and_multi_get_are_one_moment(connect: Connect) -> None:
    writer, reader = connect(), connect()
    writer.multi_set({"a": b"0", "b": b"0"})
    done = threading.Event()

    def write() -> None:
        for number in range(1, 60):
            writer.multi_set({"a": b"%d" % number, "b": b"%d" % number})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        first, second = reader.multi_get(["a", "b"], 0)
        assert first == second
    thread.join()


def test_num_keys_counts_keys_and_queues_with_something_in_them(kind: str, store: Store) -> None:
    assert store.num_keys() == 0
    store.multi_set({"a": b"", "b": b"", "c": b""})
    store.delete_key("b")
    store.set("a", b"again")
    assert store.num_keys() == 2
    if kind in ONLY_BOOTSTRAP:
        return
    store.queue_push("a", b"1")
    store.queue_push("a", b"2")
    store.queue_push("q", b"3")
    assert store.num_keys() == 4
    store.queue_pop("a", 0)
    assert store.num_keys() == 4
    store.queue_pop("a", 0)
    assert store.num_keys() == 3


@pytest.mark.usefixtures("whole")
def test_delete_prefix_removes_keys_and_queues(store: Store) -> None:
    store.multi_set(
        {"round 1": b"", "round 1/a": b"", "round 1/b": b"", "round 10": b"", "roun": b"", "x": b""}
    )
    store.queue_push("round 1/q", b"1")
    store.queue_push("round 1/q", b"2")
    store.queue_push("round 2", b"")
    store.hold("round 1/held", b"")
    assert store.delete_prefix("round 1/") == 4
    assert store.check(["round 1", "round 10", "roun", "x"])
    for key in ("round 1/a", "round 1/b", "round 1/held"):
        assert not store.check([key])
    assert store.queue_len("round 1/q") == 0
    assert store.queue_len("round 2") == 1
    assert store.delete_prefix("round 1/") == 0
    assert store.delete_prefix("roun") == 4
    store.multi_set({"z\0": b"", "z\0\0": b""})
    store.queue_push("z\0", b"")
    store.queue_push("z\1", b"")
    assert store.delete_prefix("z\0") == 3
    assert store.queue_pop("z\1", 0) == b""
    assert store.num_keys() == 1


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("value", [b"", b"\0\xff\n", b"v" * VALUE_LIMIT_BYTES], ids=len)
def test_a_queue_gives_back_what_was_put_in(store: Store, value: bytes) -> None:
    store.queue_push("queue", value)
    assert store.queue_pop("queue", 0) == value


@pytest.mark.usefixtures("whole")
def test_a_queue_is_first_in_first_out_and_no_key(connect: Connect) -> None:
    one, other = connect(), connect()
    one.set("q", b"key")
    for number in range(12):
        (one if number % 2 else other).queue_push("q", b"%d" % number)
    one.queue_push("q2", b"else")
    one.queue_push("q\0", b"zero")
    assert one.queue_len("q") == 12
    assert [(one if number % 3 else other).queue_pop("q", 0) for number in range(12)] == [
        b"%d" % number for number in range(12)
    ]
    assert one.queue_len("q") == other.queue_len("q") == 0
    assert (one.queue_len("q2"), one.queue_len("q\0"), one.get("q", 0)) == (1, 1, b"key")
    assert not one.check(["q2"])


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("timeout_ns", [0, SECOND // 20])
def test_pop_gives_up_and_the_store_goes_on(store: Store, timeout_ns: int) -> None:
    with pytest.raises(TimeoutError, match="empty") as caught:
        store.queue_pop("empty", timeout_ns)
    assert caught.value.waited_ns == timeout_ns
    store.queue_push("empty", b"1")
    assert store.queue_pop("empty", timeout_ns) == b"1"


@pytest.mark.usefixtures("whole")
def test_each_value_is_popped_once_and_in_the_order_of_its_pusher(connect: Connect) -> None:
    clients = [connect() for _ in range(5)]
    popped: list[list[bytes]] = [[], [], []]

    def push(store: Store, name: str) -> None:
        for number in range(30):
            store.queue_push("q", f"{name} {number}".encode())

    def pop(store: Store, into: list[bytes]) -> None:
        while (value := store.queue_pop("q", LONG)) != b"end":
            into.append(value)

    poppers = [threading.Thread(target=pop, args=each) for each in zip(clients, popped)]
    pushers = [threading.Thread(target=push, args=each) for each in zip(clients[3:], "xy")]
    for thread in poppers + pushers:
        thread.start()
    for thread in pushers:
        thread.join()
    last = connect()
    for _ in poppers:
        last.queue_push("q", b"end")
    for thread in poppers:
        thread.join()
    pushed = [f"{name} {number}".encode() for name in "xy" for number in range(30)]
    assert sorted(value for values in popped for value in values) == sorted(pushed)
    for values in popped:
        for name in (b"x", b"y"):
            numbers = [int(value[2:]) for value in values if value.startswith(name)]
            assert numbers == sorted(numbers)


def test_a_fork_is_another_client_of_the_same_store(store: Store) -> None:
    other = store.fork()
    store.set("key", b"value")
    assert other.get("key", 0) == b"value"
    store.close()
    other.set("key", b"more")
    assert other.get("key", 0) == b"more"
    other.close()


@pytest.mark.usefixtures("whole")
def test_a_closed_client_refuses_and_close_may_be_repeated(store: Store) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.get("key", LONG),
        lambda: store.set("key", b""),
        lambda: store.watch({"key": None}, LONG),
        lambda: store.hold("key", b""),
    ):
        with pytest.raises(UsageError, match="has been closed"):
            call()


def test_a_store_for_bootstrap_says_what_it_has_not(kind: str, store: Store) -> None:
    if kind not in ONLY_BOOTSTRAP:
        pytest.skip("has everything")
    for call in (
        lambda: store.watch({"key": None}, 0),
        lambda: store.hold("key", b""),
        lambda: store.queue_push("q", b""),
        lambda: store.queue_pop("q", 0),
        lambda: store.queue_len("q"),
        lambda: store.delete_prefix("key"),
    ):
        with pytest.raises(UsageError, match="meet at a store of Ronde's"):
            call()


def test_the_address_says_where_it_is(kind: str, connect: Connect) -> None:
    one, other = connect(), connect()
    assert one.address == other.address
    assert one.address.startswith(("memory", "unix:", "tcp:", "file:", "etcd:"))
    assert (kind in IN_ONE_PROCESS) == (one.address == "memory")
