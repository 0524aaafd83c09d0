"""Every store wakes clients that wait for a key, a queue or a change, in this process and in others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.conformance.store_kinds import WHOLE_KINDS
from tests.conformance.store_processes import LONG, SECOND, Remote, Where

from ronde.errors import TimeoutError, UsageError
from ronde.stores.store import Store

Connect = Callable[[], Store]
SOON_S = 0.05  # long enough for a client to begin to wait, most of the time


@pytest.fixture(scope="module", params=WHOLE_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def soon(change: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(SOON_S, change)
    timer.start()
    yield
    timer.join()


def test_watch_returns_at_once_what_differs(store: Store) -> None:
    store.multi_set({"a": b"1", "b": b"2", "empty": b""})
    assert store.watch({"a": b"0", "b": b"2"}, LONG) == {"a": b"1"}
    assert store.watch({"a": None, "b": b"x", "c": None}, LONG) == {"a": b"1", "b": b"2"}
    assert store.watch({"c": b"1", "a": b"1"}, LONG) == {"c": None}
    assert store.watch({"empty": None}, LONG) == {"empty": b""}
    assert store.watch({"c": b""}, LONG) == {"c": None}


@pytest.mark.parametrize("timeout_ns", [0, SECOND // 20])
def test_watch_returns_nothing_if_nothing_changes(store: Store, timeout_ns: int) -> None:
    store.set("a", b"1")
    assert store.watch({"a": b"1", "b": None}, timeout_ns) == {}
    assert store.watch({}, timeout_ns) == {}


CHANGES: dict[str, tuple[Callable[[Store], object], dict[str, bytes | None]]] = {
    "set": (lambda store: store.set("key", b"2"), {"key": b"2"}),
    "new": (lambda store: store.set("other", b""), {"other": b""}),
    "delete": (lambda store: store.delete_key("key"), {"key": None}),
    "add": (lambda store: store.add("key", 4), {"key": b"5"}),
    "append": (lambda store: store.append("key", b"2"), {"key": b"12"}),
    "compare_set": (lambda store: store.compare_set("key", b"1", b"3"), {"key": b"3"}),
    "multi_set": (lambda store: store.multi_set({"key": b"6", "other": b"7"}), {"key": b"6", "other": b"7"}),
    "delete_prefix": (lambda store: store.delete_prefix("k"), {"key": None}),
    "hold": (lambda store: store.hold("key", b"8"), {"key": b"8"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_watch_returns_when_a_key_changes(connect: Connect, change: str) -> None:
    watcher, changer = connect(), connect()
    changer.set("key", b"1")
    make, expected = CHANGES[change]
    with soon(lambda: make(changer)):
        assert watcher.watch({"key": b"1", "other": None}, LONG) == expected


def test_watch_sleeps_through_what_does_not_concern_it(connect: Connect) -> None:
    watcher, changer = connect(), connect()
    changer.set("key", b"1")

    def change() -> None:
        changer.set("key", b"1")  # the same
        changer.set("another", b"1")
        changer.queue_push("key", b"1")
        changer.set("key", b"2")

    with soon(change):
        assert watcher.watch({"key": b"1"}, LONG) == {"key": b"2"}


def test_watch_follows_a_key_from_value_to_value(connect: Connect) -> None:
    watcher, changer = connect(), connect()

    def change() -> None:
        for number in range(50):
            changer.set("key", b"%d" % number)

    with soon(change):
        known: dict[str, bytes | None] = {"key": None}
        seen = []
        while known["key"] != b"49":
            changed = watcher.watch(known, LONG)
            assert changed
            known |= changed
            seen.append(int(known["key"] or b"-1"))
    assert seen == sorted(set(seen))


def test_many_watchers_of_many_keys(connect: Connect) -> None:
    known: dict[str, bytes | None] = {f"key {number}": b"0" for number in range(300)}
    setter = connect()
    for start in range(0, 300, 100):
        setter.multi_set({f"key {number}": b"0" for number in range(start, start + 100)})
    answers: list[dict[str, bytes | None]] = []
    watchers = [connect() for _ in range(8)]
    threads = [
        threading.Thread(target=lambda store=store: answers.append(store.watch(known, LONG)))
        for store in watchers
    ]
    for thread in threads:
        thread.start()
    time.sleep(SOON_S)
    setter.set("key 250", b"1")
    for thread in threads:
        thread.join()
    assert answers == [{"key 250": b"1"}] * 8


def test_another_process_wakes_a_waiting_client(where: Where, connect: Connect) -> None:
    store = connect()
    waits: list[tuple[Callable[[], Any], object]] = [
        (lambda: store.get("key", LONG), b"1"),
        (lambda: store.wait(["key", "other"], LONG), None),
        (lambda: store.multi_get(["other", "key"], LONG), [b"2", b"1"]),
        (lambda: store.queue_pop("queue", LONG), b"3"),
        (lambda: store.watch({"key": None}, LONG), {"key": b"1"}),
    ]
    with Remote(where) as other:
        for wait, expected in waits:
            for key in ("key", "other", "queue"):
                other.call("delete_prefix", key)

            def change() -> None:
                other.start("multi_set", {"key": b"1", "other": b"2"})
                other.start("queue_push", "queue", b"3")

            with soon(change):
                assert wait() == expected
            other.result(), other.result()


def test_a_killed_popper_takes_nothing(where: Where, connect: Connect) -> None:
    store = connect()
    with Remote(where) as victim:
        victim.call("num_keys")
        victim.start("queue_pop", "queue", LONG)
        time.sleep(SOON_S)
        victim.kill()
    time.sleep(SOON_S)  # the store may need a moment to notice that the client is gone
    store.queue_push("queue", b"1")
    assert store.queue_pop("queue", LONG) == b"1"


def test_the_longest_waiting_client_pops_first_where_one_process_serves(kind: str, connect: Connect) -> None:
    if kind in ("file", "etcd"):
        pytest.skip("nobody knows there who waits")
    popped: list[tuple[int, bytes]] = []
    threads = []
    for number in range(3):
        store = connect()
        threads.append(
            threading.Thread(
                target=lambda store=store, number=number: popped.append((number, store.queue_pop("q", LONG)))
            )
        )
        threads[-1].start()
        time.sleep(SOON_S)
    pusher = connect()
    for value in (b"0", b"1", b"2"):
        pusher.queue_push("q", value)
    for thread in threads:
        thread.join()
    assert sorted(popped) == [(0, b"0"), (1, b"1"), (2, b"2")]


def test_a_waiting_thread_does_not_block_others_of_its_client(kind: str, store: Store) -> None:
    if kind not in {"memory", "file"}:
        pytest.skip("has one connection")
    with soon(lambda: store.set("key", b"1")):
        assert store.get("key", LONG) == b"1"


@pytest.mark.parametrize(
    "wait",
    [
        lambda store: store.get("key", LONG),
        lambda store: store.queue_pop("queue", LONG),
        lambda store: store.watch({"key": None}, LONG),
        lambda store: store.watch({}, LONG),
    ],
    ids=["get", "queue_pop", "watch", "watch nothing"],
)
def test_closing_ends_the_waiting_of_another_thread(
    connect: Connect, wait: Callable[[Store], object]
) -> None:
    store = connect()
    store.hold("held", b"")
    with soon(store.close), pytest.raises(UsageError, match="has been closed"):
        wait(store)
    assert connect().num_keys() == 0


def test_closing_ends_a_wait_that_is_about_to_begin(connect: Connect) -> None:
    for _ in range(40):
        store = connect()
        begun = threading.Event()
        ends: list[BaseException] = []

        def wait(
            store: Store = store, begun: threading.Event = begun, ends: list[BaseException] = ends
        ) -> None:
            begun.set()
            try:
                store.get("key", LONG)
            except UsageError as error:
                ends.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        begun.wait()
        store.close()
        thread.join(30)
        assert ends, "it still waits"


@pytest.mark.slow
def test_many_processes_count_together(where: Where, connect: Connect) -> None:
    remotes = [Remote(where) for _ in range(3)]
    try:
        for remote in remotes:
            for _ in range(40):
                remote.start("add", "n", 1)
        seen = [remote.result() for remote in remotes for _ in range(40)]
    finally:
        for remote in remotes:
            remote.__exit__(None, None, None)
    assert sorted(seen) == list(range(1, 121))
    assert connect().get("n", 0) == b"120"


def test_timeouts_are_kept_while_others_change_everything_else(connect: Connect) -> None:
    store, changer = connect(), connect()
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            changer.set(f"key {number % 3}", b"%d" % number)
            number += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            store.get("absent", SECOND // 5)
        assert store.watch({"absent": None}, SECOND // 5) == {}
    finally:
        stop.set()
        thread.join()
