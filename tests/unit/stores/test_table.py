"""The promises of a table to its server; those to users are in tests/conformance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ronde.errors import UsageError
from ronde.stores.store import VALUE_LIMIT_BYTES
from ronde.stores.table import Table


def content(table: Table) -> object:
    return dict(table.items()), {queue: list(values) for queue, values in table.queues()}


def change_something(table: Table, chance: random.Random) -> None:
    name, value = chance.choice([b"a", b"b", b"ab", b"c"]), b"%d" % chance.randrange(3)
    changes: list[Callable[[], object]] = [
        lambda: table.set(name, value),
        lambda: table.add(name, 1),
        lambda: table.append(name, value),
        lambda: table.compare_set(name, b"1", value),
        lambda: table.delete(name),
        lambda: table.push(name, value),
        lambda: table.pop(name),
        lambda: table.delete_prefix(b"a"),
        lambda: table.multi_set({b"a": value, b"b": value}),
    ]
    chance.choice(changes)()
    if len(table.get(name) or b"") > 20:  # or it becomes a number too long to add to
        table.delete(name)


def test_undo_takes_back_whatever_has_changed() -> None:
    chance = random.Random(5)
    table = Table()
    for _ in range(300):
        before = content(table)
        table.begin_changes()
        for _ in range(chance.randrange(6)):
            change_something(table, chance)
        if chance.random() < 0.5:
            table.keep_changes()
        else:
            table.undo_changes()
            assert content(table) == before


def test_delete_prefix_says_what_was_there() -> None:
    table = Table()
    table.multi_set({b"a/1": b"", b"a/2": b"", b"b": b""})
    table.push(b"a/1", b"x")
    table.push(b"a/1", b"y")
    assert table.delete_prefix(b"a/") == ([b"a/1", b"a/2"], [b"a/1"])
    assert table.num_keys() == 1
    assert table.delete_prefix(b"a/") == ([], [])


def test_a_held_key_goes_with_its_last_holder() -> None:
    table = Table()
    table.hold(b"key", b"1", "one")
    table.hold(b"key", b"2", "other")
    assert table.release_holder("one") == []
    table.set(b"key", b"3")
    assert table.get(b"key") == b"3"
    assert list(table.items()) == []
    assert table.release_holder("other") == [b"key"]
    assert table.get(b"key") is None


def test_a_held_key_that_was_deleted_is_held_no_longer() -> None:
    table = Table()
    table.hold(b"key", b"1", "one")
    assert b"key" in table.holders()
    assert table.delete(b"key")
    table.set(b"key", b"2")
    assert table.release_holder("one") == []
    assert dict(table.items()) == {b"key": b"2"}


def test_held_keys_are_in_no_journal() -> None:
    table = Table()
    table.set(b"was kept", b"1")
    table.begin_changes()
    table.hold(b"held", b"2", "client")
    table.hold(b"was kept", b"3", "client")
    table.set(b"kept", b"4")
    assert set(table.changes()) == {
        ("key", b"held", None),
        ("key", b"was kept", None),
        ("key", b"kept", b"4"),
    }


def test_append_keeps_to_the_limit() -> None:
    table = Table()
    table.append(b"key", b"v" * VALUE_LIMIT_BYTES)
    with pytest.raises(UsageError, match="cannot append 1 bytes to 'key', which has 1048576"):
        table.append(b"key", b"v")
    table.append(b"key", b"")
    assert len(table.get(b"key") or b"") == VALUE_LIMIT_BYTES
