"""A store's journal: whatever happens to its end, the store is as it was after some turn, and never otherwise."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.stores import journal
from ronde.stores.journal import Journal, pack_changes, pack_sessions, read_journal
from ronde.stores.table import Table

State = tuple[dict[bytes, bytes], dict[bytes, list[bytes]]]


def content(table: Table) -> State:
    return dict(table.items()), {queue: list(values) for queue, values in table.queues()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def opened(path: Path) -> Iterator[Journal]:
    it = Journal(path)
    yield it
    it.close()


def turns(opened: Journal, path: Path, count: int, seed: int = 1) -> list[tuple[int, State]]:
    """Write so many turns of changes; return the size of the file and the state after each."""
    chance = random.Random(seed)
    table = Table()
    opened.load(table)
    after = [(path.stat().st_size, content(table))]
    for turn in range(count):
        table.begin_changes()
        for _ in range(chance.randrange(1, 4)):
            name = chance.choice([b"a", b"b", b"c"])
            if chance.random() < 0.3:
                table.push(name, b"%d" % turn)
            elif chance.random() < 0.3:
                table.pop(name)
            elif chance.random() < 0.3:
                table.delete(name)
            else:
                table.set(name, b"v" * chance.randrange(50))
        table.set(b"turn", b"%d" % turn)
        opened.write(
            pack_changes(table.changes()) + pack_sessions([(b"i" * 16, turn + 1, b"answer %d" % turn)])
        )
        table.keep_changes()
        after.append((path.stat().st_size, content(table)))
    return after


def test_it_comes_back_as_it_was(opened: Journal, path: Path) -> None:
    _, state = turns(opened, path, 100)[-1]
    table = Table()
    assert read_journal(path, table) == ([(b"i" * 16, 100, b"answer 99")], path.stat().st_size)
    assert content(table) == state


def test_a_torn_end_is_as_if_its_turn_had_not_been(opened: Journal, path: Path, tmp_path: Path) -> None:
    after = turns(opened, path, 6)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        torn = tmp_path / "torn"
        for tail in (b"", b"\0" * 100):
            torn.write_bytes(whole[:length] + tail)
            table = Table()
            if not tail or length >= after[0][0]:
                read_journal(torn, table)
                assert (
                    content(table) == [state for size, state in after if size <= max(length, after[0][0])][-1]
                )
                continue
            with pytest.raises(UsageError, match="is not a journal of a store"):
                read_journal(torn, table)


def test_it_goes_on_behind_a_torn_end(path: Path) -> None:
    first = Journal(path)
    size, _ = turns(first, path, 5)[-1]
    first.close()
    with path.open("r+b") as file:
        file.truncate(size - 3)
    again = Journal(path)
    table = Table()
    again.load(table)
    assert table.get(b"turn") == b"3"
    again.write(pack_changes([("key", b"turn", b"new")]))
    again.close()
    table = Table()
    read_journal(path, table)
    assert table.get(b"turn") == b"new"


@pytest.mark.parametrize("place", [31, 34, 40, 60])  # the first record's length, its sums, what it says
def test_damage_before_the_end_is_an_error(opened: Journal, path: Path, place: int) -> None:
    turns(opened, path, 50)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match=rf"the journal {path} is damaged at byte 31 of \d+"):
        read_journal(path, Table())


def test_a_file_that_is_no_journal(path: Path) -> None:
    path.write_bytes(b"my thesis")
    it = Journal(path)
    with pytest.raises(UsageError, match="is not a journal of a store"):
        it.load(Table())
    it.close()
    assert path.read_bytes() == b"my thesis"
    with pytest.raises(UsageError, match=r"cannot read the journal .*: No such file"):
        read_journal(path.with_name("absent"), Table())
    with pytest.raises(UsageError, match=r"cannot open the journal .*: Is a directory"):
        Journal(path.parent)


@pytest.mark.usefixtures("opened")
def test_two_stores_cannot_have_one(path: Path) -> None:
    with pytest.raises(UsageError, match="another store is using it"):
        Journal(path)


def test_written_anew_it_says_the_same_in_less(
    opened: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SMALLEST_REWRITE_BYTES", 2000)
    assert not opened.is_overgrown
    size, state = turns(opened, path, 200)[-1]
    assert opened.is_overgrown
    table = Table()
    sessions, _ = read_journal(path, table)
    table.hold(b"held", b"", "somebody")
    opened.rewrite(table, sessions)
    assert not opened.is_overgrown
    with pytest.raises(UsageError, match="another store is using it"):
        Journal(path)
    opened.write(pack_changes([("key", b"more", b"1")]))
    assert path.stat().st_size < size / 3
    table = Table()
    assert read_journal(path, table)[0] == sessions
    assert content(table) == ({**state[0], b"more": b"1"}, state[1])
    assert [entry.name for entry in path.parent.iterdir()] == ["journal"]
