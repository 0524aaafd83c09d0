"""Every store keeps a held key exactly while its holder lives, and reports its end to watching clients."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
from tests.conformance.store_kinds import WHOLE_KINDS
from tests.conformance.store_processes import LONG, SECOND, Remote, Where

from ronde.errors import TimeoutError
from ronde.stores.store import Store

Connect = Callable[[], Store]


@pytest.fixture(scope="module", params=WHOLE_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_held_key_is_a_key_like_any_other(connect: Connect) -> None:
    holder, other = connect(), connect()
    holder.hold("key", b"1")
    assert other.get("key", 0) == b"1"
    assert other.add("key", 2) == 3
    assert other.compare_set("key", b"3", b"4") == b"4"
    other.append("key", b"5")
    holder.hold("key", b"6")
    assert other.multi_get(["key"], 0) == [b"6"]
    assert other.num_keys() == 1


def test_closing_lets_go_of_what_is_held_and_nothing_else(connect: Connect) -> None:
    holder, other = connect(), connect()
    holder.set("set", b"1")
    holder.hold("held", b"2")
    holder.hold("held too", b"3")
    other.hold("of another", b"4")
    holder.close()
    known: dict[str, bytes | None] = {"held": b"2", "held too": b"3", "set": b"1", "of another": b"4"}
    while known["held"] or known["held too"]:
        known |= other.watch(known, LONG)
    assert known == {"held": None, "held too": None, "set": b"1", "of another": b"4"}
    with pytest.raises(TimeoutError):
        other.get("held", 0)
    assert other.num_keys() == 2


def test_a_closing_holder_wakes_watchers(connect: Connect) -> None:
    holder, watcher = connect(), connect()
    holder.hold("key", b"1")
    timer = threading.Timer(0.1, holder.close)
    timer.start()
    assert watcher.watch({"key": b"1"}, LONG) == {"key": None}
    timer.join()


def test_a_held_key_that_another_client_sets_is_still_held(connect: Connect) -> None:
    holder, other = connect(), connect()
    holder.hold("a", b"1")
    holder.hold("b", b"1")
    holder.hold("c", b"1")
    other.set("a", b"2")
    other.multi_set({"b": b"2"})
    other.add("c", 1)
    holder.close()
    known: dict[str, bytes | None] = {"a": b"2", "b": b"2", "c": b"2"}
    while any(known.values()):
        known |= other.watch(known, LONG)


def test_the_last_client_to_hold_a_key_holds_it(connect: Connect) -> None:
    first, last, other = connect(), connect(), connect()
    first.hold("key", b"1")
    last.hold("key", b"2")
    first.hold("only first", b"")
    first.close()
    assert other.watch({"only first": b""}, LONG) == {"only first": None}
    assert other.get("key", 0) == b"2"
    last.close()
    assert other.watch({"key": b"2"}, LONG) == {"key": None}


def test_a_deleted_key_is_held_no_longer(connect: Connect) -> None:
    holder, other = connect(), connect()
    holder.hold("a", b"1")
    holder.hold("b/1", b"1")
    holder.hold("c", b"1")
    assert holder.delete_key("a")
    assert other.delete_prefix("b/") == 1
    other.set("a", b"2")
    other.set("b/1", b"2")
    holder.close()
    assert other.watch({"c": b"1"}, LONG) == {"c": None}
    assert other.multi_get(["a", "b/1"], 0) == [b"2", b"2"]


def test_forks_hold_for_themselves(connect: Connect) -> None:
    store, watcher = connect(), connect()
    fork = store.fork()
    store.hold("a", b"1")
    fork.hold("b", b"1")
    store.close()
    assert watcher.watch({"a": b"1"}, LONG) == {"a": None}
    assert watcher.get("b", 0) == b"1"
    fork.close()
    assert watcher.watch({"b": b"1"}, LONG) == {"b": None}


def test_a_killed_process_holds_nothing(where: Where, connect: Connect) -> None:
    store = connect()
    with Remote(where) as victim:
        victim.call("hold", "alive", b"1")
        victim.call("set", "set", b"2")
        assert store.watch({"alive": None}, LONG) == {"alive": b"1"}
        victim.kill()
    assert store.watch({"alive": b"1"}, LONG) == {"alive": None}
    assert not store.check(["alive"])
    assert store.get("set", 0) == b"2"
    assert store.num_keys() == 1


def test_a_killed_process_holds_nothing_although_its_forked_child_lives(
    where: Where, connect: Connect
) -> None:
    store = connect()
    with Remote(where) as victim:
        victim.call("hold", "alive", b"1")
        child = victim.call("fork and sleep", LONG / SECOND)
        try:
            assert store.get("alive", 0) == b"1"
            victim.kill()
            assert store.watch({"alive": b"1"}, LONG) == {"alive": None}
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_key_of_a_dead_holder_can_be_held_by_another(where: Where, connect: Connect) -> None:
    store = connect()
    with Remote(where) as victim:
        victim.call("hold", "leader", b"1")
        victim.kill()
    store.watch({"leader": b"1"}, LONG)
    store.hold("leader", b"2")
    with Remote(where) as other:
        assert other.call("get", "leader", 0) == b"2"
