"""A store in a file survives deaths in the middle of a write, a full disk, damage, and replacement."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.errors import PeerLostError, UsageError
from ronde.stores.file import COMPACT_BYTES, FileStore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def content(path: Path) -> dict[str, bytes]:
    store = FileStore(path)
    try:
        return {key: store.get(key, 0) for key in ("a", "b", "c", "d") if store.check([key])}
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [(1, 25), (2, 100)])
def test_nothing_acknowledged_is_lost_when_writers_are_killed(path: Path, seed: int, kills: int) -> None:
    command = [sys.executable, "-m", "tests.unit.stores.killed_writers", str(path), str(seed), str(kills)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert f"{kills} killed" in done.stdout


def test_a_record_cut_off_anywhere_is_as_if_it_had_never_been_begun(path: Path) -> None:
    store = FileStore(path)
    store.multi_set({"a": b"1", "b": b"2"})
    whole = path.stat().st_size
    store.multi_set({"a": b"3", "c": b"4" * 20})
    store.close()
    text = path.read_bytes()
    for size in range(whole, len(text)):
        path.write_bytes(text[:size])
        assert content(path) == {"a": b"1", "b": b"2"}
        writer = FileStore(path)
        writer.set("d", b"5")
        writer.close()
        assert content(path) == {"a": b"1", "b": b"2", "d": b"5"}
    path.write_bytes(text[:whole] + bytes(100))  # the machine died, and the file has only got its size
    assert content(path) == {"a": b"1", "b": b"2"}


def test_a_header_that_was_cut_off_is_an_empty_store(path: Path) -> None:
    FileStore(path).close()
    store = FileStore(path)
    store.set("a", b"1")
    store.close()
    text = path.read_bytes()
    for size in range(22):
        path.write_bytes(text[:size])
        assert content(path) == {}
        store = FileStore(path)
        store.set("a", b"1")
        store.close()
        assert path.read_bytes() == text


def test_damage_is_an_error_and_not_skipped(path: Path) -> None:
    store = FileStore(path)
    store.set("a", b"1" * 50)
    store.set("b", b"2" * 50)
    text = path.read_bytes()
    for at in range(22, len(text), 7):
        path.write_bytes(text[:at] + bytes([text[at] ^ 0x40]) + text[at + 1 :])
        with pytest.raises(PeerLostError, match="is damaged at byte"):
            FileStore(path)
    path.write_bytes(text)
    store.set("c", b"3")
    assert sorted(content(path)) == ["a", "b", "c"]
    store.close()


def test_a_file_that_is_no_store_is_left_alone(path: Path) -> None:
    path.write_text("precious and longer than any header of ours")
    with pytest.raises(UsageError, match="is not a store; give the store another path"):
        FileStore(path)
    assert path.read_text().startswith("precious")


def test_a_store_of_another_version_is_named_as_one(path: Path) -> None:
    store = FileStore(path)
    store.set("a", b"1")
    store.close()
    path.write_bytes(path.read_bytes().replace(b"Ronde, 2 ", b"Ronde, 1 "))
    with pytest.raises(
        UsageError, match="is a store of another version of Ronde; if no job uses it, remove it"
    ):
        FileStore(path)


def test_a_value_that_grows_is_not_written_again(path: Path) -> None:
    store = FileStore(path)
    for _ in range(100):
        store.append("a", bytes(100))
    assert content(path) == {"a": bytes(100 * 100)}
    assert path.stat().st_size < 2 * 100 * 100
    store.close()


def test_a_path_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "store", "No such file or directory"),
    ):
        with pytest.raises(UsageError, match=f"{path} cannot be opened for writing: {reason}"):
            FileStore(path)


def test_a_removed_file_is_an_error_at_once(path: Path) -> None:
    store = FileStore(path)
    store.set("a", b"1")
    path.unlink()
    for _ in range(2):
        with pytest.raises(PeerLostError, match="its file was removed"):
            store.get("a", 10**9)
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine permits no mounts")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_is_an_error_and_changes_nothing(small_disk: Path) -> None:
    store, other = FileStore(small_disk / "store"), FileStore(small_disk / "store")
    filler = small_disk / "filler"
    store.set("a", b"1")
    filler.write_bytes(bytes(100_000))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="No space left on device; nothing has changed"):
            store.multi_set({"a": b"2", "b": bytes(200_000)})
        assert store.get("a", 0) == other.get("a", 0) == b"1"
        assert not other.check(["b"])
    with pytest.raises(PeerLostError, match="No space left"):
        store.queue_push("q", bytes(200_000))
    assert store.queue_len("q") == 0
    filler.unlink()
    store.multi_set({"a": b"2", "b": bytes(150_000)})
    assert other.multi_get(["a", "b"], 0) == [b"2", bytes(150_000)]
    for client in (store, other):
        client.close()


def test_history_is_thrown_away_while_others_go_on(path: Path) -> None:
    store, other, holder = FileStore(path), FileStore(path), FileStore(path)
    holder.hold("held", b"")
    other.queue_push("q", b"1")
    other.queue_push("q", b"2")
    for number in range(40):
        store.set("a", b"%d" % number + bytes(COMPACT_BYTES // 4))
        other.add("b", 1)
    assert path.stat().st_size < 3 * COMPACT_BYTES
    assert other.get("a", 0).startswith(b"39\0")
    assert store.get("b", 0) == b"40"
    assert store.check(["held"])
    assert [store.queue_pop("q", 0), other.queue_pop("q", 0)] == [b"1", b"2"]
    holder.close()
    assert not other.check(["held"])
    assert os.listdir(path.parent) in (["store", "store.alive"], ["store.alive", "store"])
    for client in (store, other):
        client.close()


def test_a_death_while_history_is_thrown_away_changes_nothing(path: Path) -> None:
    store = FileStore(path)
    store.set("a", b"1")
    text = path.read_bytes()
    (path.parent / "store.new").write_bytes(b"half of it")
    with path.open("r+b") as file:  # marked as replaced, but its replacement was not renamed
        file.write(text.replace(b".\n", b"!\n", 1))
    assert store.get("a", 0) == b"1"
    assert content(path) == {"a": b"1"}
    store.set("b", b"2")
    assert path.read_bytes().startswith(text[:22])
    assert content(path) == {"a": b"1", "b": b"2"}
    store.close()


def test_clients_with_an_old_file_open_find_the_new_one(path: Path) -> None:
    clients = [FileStore(path) for _ in range(4)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def write(store: FileStore) -> None:
        chance = random.Random(0)
        try:
            while not stop.is_set():
                store.set(f"large {chance.randrange(2)}", bytes(COMPACT_BYTES // 3))
                store.add("n", 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(store,)) for store in clients]
    for thread in threads:
        thread.start()
    files = set()
    for _ in range(100):
        files.add(path.stat().st_ino)
        time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(files) > 1
    values = {store.get("n", 0) for store in clients}
    assert len(values) == 1
    for store in clients:
        store.close()


def test_a_forked_child_is_another_client(path: Path) -> None:
    program = """if True:
        import os, sys
        from ronde.stores.file import FileStore
        store = FileStore(sys.argv[1])
        store.hold("held", b"")
        store.set("a", b"parent")
        if os.fork() == 0:
            assert store.get("a", 0) == b"parent"
            assert store.check(["held"])
            store.set("a", b"child")
            store.hold("of the child", b"")
            store.close()
            os._exit(0)
        assert os.wait()[1] == 0
        assert store.get("a", 0) == b"child"
        assert store.check(["held"])
        assert not store.check(["of the child"])
    """
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert content(path) == {"a": b"child"}


def test_a_new_store_where_an_old_one_was_removed(path: Path) -> None:
    old = FileStore(path)
    old.hold("a", b"old")
    path.unlink()
    new, other = FileStore(path), FileStore(path)
    new.hold("a", b"new")
    assert other.get("a", 0) == b"new"
    with pytest.raises(PeerLostError, match="its file was removed"):
        old.get("a", 0)
    old.close()
    assert other.get("a", 0) == b"new"
    new.close()
    assert not other.check(["a"])
    other.close()


def test_the_mode_of_the_file_is_kept(path: Path) -> None:
    path.touch(0o660)
    path.chmod(0o660)
    store = FileStore(path)
    with path.open("rb") as old:  # no other file gets its inode while it is open
        for number in range(12):
            store.set("a", bytes(COMPACT_BYTES // 2) + b"%d" % number)
        assert not path.samefile(f"/proc/self/fd/{old.fileno()}")
    assert path.stat().st_mode & 0o777 == 0o660
    store.close()


def test_close_spares_files_with_the_numbers_of_closed_descriptors(path: Path, tmp_path: Path) -> None:
    """The program has called os.closerange and then opened files."""
    store = FileStore(path)
    store.hold("a", b"1")
    numbers = [store._log._fd, store._live_clients._fd]
    foreign = tmp_path / "foreign"
    with open(foreign, "w+b", buffering=0) as file:
        file.write(b"x" * 100)
        for number in numbers:
            os.dup2(file.fileno(), number)  # closes the store's file
        with pytest.raises(PeerLostError, match="the program has closed its file"):
            store.set("b", b"2")
        store.close()
        for number in numbers:
            assert os.path.sameopenfile(number, file.fileno())
            os.close(number)
    assert foreign.read_bytes() == b"x" * 100
