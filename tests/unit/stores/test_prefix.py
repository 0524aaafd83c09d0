"""How names are mapped; that it is a store like any other is in tests/conformance."""

from __future__ import annotations

import pytest

from ronde.errors import TimeoutError, UsageError
from ronde.stores.memory import MemoryStore
from ronde.stores.prefix import PrefixStore
from ronde.stores.store import KEY_LIMIT_BYTES


def test_prefixes_nest_and_the_store_has_the_whole_keys() -> None:
    store = MemoryStore()
    inner = PrefixStore(PrefixStore(store, "job/"), "round 1/")
    inner.set("key", b"1")
    inner.queue_push("queue", b"2")
    inner.hold("held", b"3")
    assert store.get("job/round 1/key", 0) == b"1"
    assert store.queue_len("job/round 1/queue") == 1
    assert inner.watch({"key": b"1", "held": None}, 0) == {"held": b"3"}
    with pytest.raises(TimeoutError, match="'job/round 1/absent'"):
        inner.get("absent", 0)


def test_parts_of_a_store_do_not_see_each_other_but_count_together() -> None:
    store = MemoryStore()
    one, other = PrefixStore(store, "a/"), PrefixStore(store, "b/")
    one.multi_set({"x": b"1", "y": b"2"})
    other.set("x", b"3")
    assert one.multi_get(["x", "y"], 0) == [b"1", b"2"]
    assert not other.check(["y"])
    assert one.num_keys() == other.num_keys() == store.num_keys() == 3
    assert one.delete_prefix("") == 2
    assert other.get("x", 0) == b"3"


def test_the_prefix_takes_its_part_of_a_keys_bytes() -> None:
    store = PrefixStore(MemoryStore(), "ten bytes/")
    store.set("k" * (KEY_LIMIT_BYTES - 10), b"")
    with pytest.raises(UsageError, match="1 to 1024 bytes"):
        store.set("k" * (KEY_LIMIT_BYTES - 9), b"")
    with pytest.raises(UsageError, match="1 to 1024 bytes"):
        store.set("", b"")


def test_closing_it_closes_the_client_and_a_fork_is_another() -> None:
    store = MemoryStore()
    part = PrefixStore(store.fork(), "a/")
    fork = part.fork()
    part.hold("one", b"")
    fork.hold("other", b"")
    part.close()
    assert not fork.check(["one"])
    assert fork.check(["other"])
    fork.close()
    assert store.num_keys() == 0
