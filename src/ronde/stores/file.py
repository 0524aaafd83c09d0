"""A store in a file, for any number of processes that share a file system, and no server.

A waiting client reads the file every few milliseconds, because file systems do not report changes. Use this store for
meeting and for small jobs, and another one for a job with hundreds of ranks.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import TypeVar

from ronde.errors import PeerLostError, UsageError
from ronde.stores.base import check_key, check_value, waited_in_vain
from ronde.stores.file_log import FileLog, LiveClients
from ronde.stores.table import Table
from ronde.stores.table_reader import TableReader

__all__ = ["FileStore"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.02
COMPACT_BYTES = 1 << 20  # smaller files are not worth compacting
COMPACT_RATIO = 4  # how many times larger than its content a file may be

_HEAD = struct.Struct("!BHIQ")  # kind, length of the name, length of the value, number

Found = TypeVar("Found")


class _ChangeKind(IntEnum):
    """The kind of an entry. A record has several entries where several keys changed at one moment."""

    SET = 1
    APPEND = 2
    DELETE = 3
    DELETE_PREFIX = 4
    PUSH = 5
    POP = 6
    HOLD = 7  # by the client with this number
    RELEASE = 8
    NUMBER = 9  # the highest number of a client


def _entry(kind: _ChangeKind, name: bytes = b"", value: bytes = b"", number: int = 0) -> bytes:
    return _HEAD.pack(kind, len(name), len(value), number) + name + value


class FileStore(TableReader):
    """The `Store` in the file at `path`, which is created if it does not exist, and never removed.

    A process that holds keys also creates `path` + ".alive". Raises UsageError if the path cannot be written, and
    PeerLostError from any call if the file system is full (then nothing has changed), or the file is gone or damaged.
    Threads may share the object: a waiting thread does not block the others. In a forked child the object is another
    client, without the held keys of its parent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        self._open = True
        self._closing = False
        self._lock = threading.Lock()  # one query or change at a time
        self._forked = False
        self._highest = 0  # the highest number of a client so far
        self._open_files()
        try:
            self._query_table(lambda _: None, ())  # raises now if the file is not a store
        except BaseException:
            self._close_files()
            raise
        _stores.add(self)

    @property
    def address(self) -> str:
        return f"file:{self._path}"

    def set(self, key: str, value: bytes) -> None:
        self._write_change([check_key(key)], _entry(_ChangeKind.SET, check_key(key), check_value(key, value)))

    def add(self, key: str, amount: int) -> int:
        encoded = check_key(key)

        def add(table: Table) -> tuple[int, bytes]:
            total = table.add(encoded, amount)
            return total, _entry(_ChangeKind.SET, encoded, b"%d" % total)

        return self._change_table([encoded], add)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        encoded = check_key(key)
        expected, desired = check_value(key, expected), check_value(key, desired)

        def compare_set(table: Table) -> tuple[bytes, bytes]:
            before = table.get(encoded)
            value = table.compare_set(encoded, expected, desired)
            changed = table.get(encoded) != before
            return value, _entry(_ChangeKind.SET, encoded, desired) if changed else b""

        return self._change_table([encoded], compare_set)

    def delete_key(self, key: str) -> bool:
        encoded = check_key(key)

        def delete(table: Table) -> tuple[bool, bytes]:
            was_there = table.delete(encoded)
            return was_there, _entry(_ChangeKind.DELETE, encoded) if was_there else b""

        return self._change_table([encoded], delete)

    def append(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)

        def append(table: Table) -> tuple[None, bytes]:
            table.append(encoded, value)
            return None, _entry(_ChangeKind.APPEND, encoded, value)

        self._change_table([encoded], append)

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        encoded = {check_key(key): check_value(key, value) for key, value in values.items()}
        if encoded:
            self._write_change(
                encoded, b"".join(_entry(_ChangeKind.SET, key, value) for key, value in encoded.items())
            )

    def delete_prefix(self, prefix: str) -> int:
        encoded = check_key(prefix)

        def delete_prefix(table: Table) -> tuple[int, bytes]:
            keys, queues = table.delete_prefix(encoded)
            count = len(keys) + len(queues)
            return count, _entry(_ChangeKind.DELETE_PREFIX, encoded) if count else b""

        return self._change_table(None, delete_prefix)

    def queue_push(self, queue: str, value: bytes) -> None:
        self._write_change((), _entry(_ChangeKind.PUSH, check_key(queue), check_value(queue, value)))

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        encoded = check_key(queue)

        def pop(table: Table) -> tuple[bytes | None, bytes]:
            value = table.pop(encoded)
            return value, b"" if value is None else _entry(_ChangeKind.POP, encoded)

        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            if not self._wait_until(
                lambda table: table.queue_len(encoded) or None, (), deadline_ns - time.monotonic_ns()
            ):
                raise waited_in_vain(queue, self.address, timeout_ns)
            value = self._change_table((), pop)
            if value is not None:  # else another client was faster
                return value

    def hold(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)

        def hold(table: Table) -> tuple[None, bytes]:
            change = b""
            if not self._live_clients.number:
                self._live_clients.claim_number(self._highest + 1)
                self._highest = self._live_clients.number
                change = _entry(_ChangeKind.NUMBER, number=self._live_clients.number)
            table.hold(encoded, value, self._live_clients.number)
            return None, change + _entry(_ChangeKind.HOLD, encoded, value, self._live_clients.number)

        was_alive = self._live_clients.number != 0
        try:
            self._change_table([encoded], hold)
        except BaseException:
            if not was_alive:  # the file does not have the new number
                self._live_clients.close()
            raise

    def fork(self) -> FileStore:
        self._check_open()
        return FileStore(self._path)

    def close(self) -> None:
        self._closing = True  # a waiting thread notices it at its next query
        with self._lock:
            if not self._open:
                return
            try:
                if self._live_clients.number:
                    # The released lock shows the others that this client is gone.
                    with suppress(PeerLostError):
                        self._release(self._live_clients.number)
            finally:
                self._open = False
                self._close_files()

    # Under the lock of the file

    def _query_table(self, query: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        with self._lock:
            return self._query_locked(query, names)

    def _query_locked(self, query: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        """Return the result of the query. Dead holders of the keys that it reads lose them."""
        self._check_open()
        self._reopen_after_fork()
        with self._log.locked(exclusive=False) as is_reset:
            self._catch_up(is_reset, exclusive=False)
            if not self._dead_holders(names):
                return query(self._table)
        return self._change_locked(names, lambda table: (query(table), b""))

    def _write_change(self, names: Iterable[bytes], change: bytes) -> None:
        def write(table: Table) -> tuple[None, bytes]:
            self._apply(change)
            return None, change

        self._change_table(names, write)

    def _change_table(
        self, names: Iterable[bytes] | None, operate: Callable[[Table], tuple[Found, bytes]]
    ) -> Found:
        with self._lock:
            self._check_open()
            return self._change_locked(names, operate)

    def _change_locked(
        self, names: Iterable[bytes] | None, operate: Callable[[Table], tuple[Found, bytes]]
    ) -> Found:
        """Operate on the table, and write the change to the file. An operation that fails changes nothing."""
        self._reopen_after_fork()
        with self._log.locked(exclusive=True) as is_reset:
            self._catch_up(is_reset, exclusive=True)
            releases = b""
            for number in self._dead_holders(names):
                self._table.release_holder(number)
                releases += _entry(_ChangeKind.RELEASE, number=number)
            try:
                if releases:
                    self._log.append_record(releases)
                found, change = operate(self._table)
                if change:
                    self._log.append_record(change)
            except UsageError:
                raise
            except BaseException:
                self._log.reset()  # the table may differ from the file
                raise
            if self._log.size_bytes > self._compact_at:
                self._compact()
            return found

    def _release(self, number: int) -> None:
        def release(table: Table) -> tuple[None, bytes]:
            return None, _entry(_ChangeKind.RELEASE, number=number) if table.release_holder(number) else b""

        self._change_locked((), release)

    def _catch_up(self, is_reset: bool, exclusive: bool) -> None:
        if is_reset:
            self._table = Table()
            self._highest = 0
        try:
            for record in self._log.read_records(exclusive):
                self._apply(record)
        except BaseException:
            self._log.reset()
            raise

    def _apply(self, record: bytes) -> None:
        table, at = self._table, 0
        while at < len(record):
            kind, name_bytes, value_bytes, number = _HEAD.unpack_from(record, at)
            at += _HEAD.size
            name = record[at : at + name_bytes]
            value = record[at + name_bytes : at + name_bytes + value_bytes]
            at += name_bytes + value_bytes
            match kind:
                case _ChangeKind.SET:
                    table.set(name, value)
                case _ChangeKind.APPEND:
                    table.append(name, value)
                case _ChangeKind.DELETE:
                    table.delete(name)
                case _ChangeKind.DELETE_PREFIX:
                    table.delete_prefix(name)
                case _ChangeKind.PUSH:
                    table.push(name, value)
                case _ChangeKind.POP:
                    table.pop(name)
                case _ChangeKind.HOLD:
                    table.hold(name, value, number)
                case _ChangeKind.RELEASE:
                    table.release_holder(number)
                case _ChangeKind.NUMBER:
                    self._highest = max(self._highest, number)

    def _dead_holders(self, names: Iterable[bytes] | None) -> list[int]:
        """Return the numbers of clients that hold one of these keys and have died; None: any key."""
        holders = self._table.holders()
        if not holders:
            return []
        numbers = set(holders.values() if names is None else (holders.get(name, 0) for name in names))
        return [number for number in numbers - {0} if self._live_clients.is_dead(number)]

    def _compact(self) -> None:
        self._log.replace_records(self._compacted_records())
        self._compact_at = max(COMPACT_BYTES, COMPACT_RATIO * self._log.size_bytes)

    def _compacted_records(self) -> Iterator[bytes]:
        yield _entry(_ChangeKind.NUMBER, number=self._highest)
        for key, value in self._table.items():
            yield _entry(_ChangeKind.SET, key, value)
        for key, number in self._table.holders().items():
            yield _entry(_ChangeKind.HOLD, key, self._table.get(key) or b"", number)
        for queue, values in self._table.queues():
            for value in values:
                yield _entry(_ChangeKind.PUSH, queue, value)

    # Between locks

    def _wait_until(
        self, query: Callable[[Table], Found | None], names: Sequence[bytes], timeout_ns: int
    ) -> Found | None:
        deadline_ns = time.monotonic_ns() + timeout_ns
        pause_s = FIRST_PAUSE_S
        while True:
            # Not during the pause: another thread may make the change that this one waits for.
            found = self._query_table(query, names)
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            if found is not None or left_s <= 0:
                return found
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _open_files(self) -> None:
        self._log = FileLog(self._path)
        self._live_clients = LiveClients(self._path + ".alive")
        self._table = Table()
        self._compact_at = COMPACT_BYTES

    def _reopen_after_fork(self) -> None:
        if self._forked:
            self._open_files()
            self._forked = False

    def _close_files(self) -> None:
        self._log.close()
        self._live_clients.close()

    def _check_open(self) -> None:
        if self._closing:
            raise UsageError(f"this client of the store at {self.address} has been closed")

    def _after_fork(self) -> None:
        """Close the parent's files, which would keep the parent's held keys alive."""
        self._close_files()
        self._lock = threading.Lock()
        self._forked = True


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
