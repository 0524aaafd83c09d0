"""A store in a file, for any number of processes that share a file system, and no server.

A waiting client reads the file every few milliseconds, because file systems do not report changes. Use this store for
meeting and for small jobs, and another one for a job with hundreds of ranks.

The file is a log of changes by processes that lock it and may die at any moment. The rules:
  1. Every access has the lock: shared for reading, exclusive for writing. It is a lock of an open file description
     (F_OFD_SETLK), on a byte far behind the end. The kernel drops it with the process; on NFS it reaches the server and
     makes the writes of others visible. Of the other two kinds of locks, flock cannot report whether a client lives
     (`LiveClients`), and classic POSIX locks do not exclude two clients of one process from each other.
  2. A record is its length, the checksum of its payload, the checksum of these two, and the payload. A record cut off
     by the end of the file is of a writer that died. It was never acknowledged, and the next writer removes it. Any
     other defect of a record is damage, and an error.
  3. When most of the file is history, a writer puts the present content into a new file and renames that. It marks the
     old file first, so that clients that have it open reopen the path. A mark on a file that was not replaced is of a
     writer that died in between, and has no effect.

Records are not forced to the disk: they survive every process, but not a crash of the machine that keeps the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from typing import TypeVar

from ronde.errors import PeerLostError, UsageError
from ronde.net.descriptors import close_own, file_identity, is_own
from ronde.stores.store import check_key, check_value, missing_keys_error
from ronde.stores.table import Table, TableStore
from ronde.trusted_files import create_anew, open_kept

__all__ = [
    "FileStore",
    "FileLog",
    "LiveClients",
]

READ_PAUSE_S, LONGEST_READ_PAUSE_S = 0.0005, 0.02
LOCK_PAUSE_S, LONGEST_LOCK_PAUSE_S = 0.00002, 0.005
LOCK_NS = 30 * 10**9  # how long another client may keep the lock, for which it needs well under a millisecond
COMPACT_BYTES = 1 << 20  # smaller files are not worth compacting
COMPACT_RATIO = 4  # how many times larger than its content a file may be

_NAME = b"a store of Ronde, "
_MAGIC = _NAME + b"2 "
_CURRENT, _REPLACED = b".\n", b"!\n"
_BEGIN = len(_MAGIC) + len(_CURRENT)
_MUTEX = 1 << 62
_RECORD_HEAD = struct.Struct("!II")
_CHECK = struct.Struct("!I")
_RECORD_HEAD_BYTES = _RECORD_HEAD.size + _CHECK.size
_ENTRY_HEAD = struct.Struct("!BHIQ")  # kind, length of the name, length of the value, number
_FLOCK = struct.Struct("@hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid

Found = TypeVar("Found")


class _ChangeKind(IntEnum):
    """The kind of an entry. A record has several entries where several keys changed at one moment."""

    SET = 1
    DELETE = 2
    PUSH = 3
    POP = 4
    HOLD = 5  # by the client with this number
    NUMBER = 6  # the highest number of a client
    APPEND = 7


def _entry(kind: _ChangeKind, name: bytes = b"", value: bytes = b"", number: int = 0) -> bytes:
    return _ENTRY_HEAD.pack(kind, len(name), len(value), number) + name + value


class FileStore(TableStore):
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

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        encoded = check_key(queue)
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            if not self._wait_until(
                lambda table: table.queue_len(encoded) or None, (), deadline_ns - time.monotonic_ns()
            ):
                raise missing_keys_error(queue, self.address, timeout_ns)
            value = self._change_table(lambda table: table.pop(encoded), ())
            if value is not None:  # else another client was faster
                return value

    def hold(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)

        def hold(table: Table) -> None:
            if not self._live_clients.number:
                self._live_clients.claim_number(self._highest + 1)
                self._highest = self._live_clients.number
            table.hold(encoded, value, self._live_clients.number)

        was_alive = self._live_clients.number != 0
        try:
            self._change_table(hold, [encoded])
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
                if number := self._live_clients.number:
                    # The released lock shows the others that this client is gone.
                    with suppress(PeerLostError):
                        self._change_locked(lambda table: table.release_holder(number), ())
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
        return self._change_locked(query, names)

    def _change_table(self, change: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        with self._lock:
            self._check_open()
            return self._change_locked(change, names)

    def _change_locked(self, change: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        """Change the table, and write the changes to the file. Dead holders of the keys lose them."""
        self._reopen_after_fork()
        with self._log.locked(exclusive=True) as is_reset:
            self._catch_up(is_reset, exclusive=True)
            for number in self._dead_holders(names):
                self._record_changes(partial(Table.release_holder, holder=number))
            found = self._record_changes(change)
            if self._log.size_bytes > self._compact_at:
                self._compact()
            return found

    def _record_changes(self, change: Callable[[Table], Found]) -> Found:
        """Change the table, and append the changes to the log as one record."""
        table = self._table
        table.begin_changes()
        try:
            found = change(table)
            if record := b"".join(self._changed_entries()):
                self._log.append_record(record)
        except UsageError:  # nothing has changed
            raise
        except BaseException:
            self._log.reset()  # the table may differ from the file
            raise
        finally:
            table.keep_changes()
        return found

    def _changed_entries(self) -> Iterator[bytes]:
        holders = self._table.holders()
        for kind, name, value in self._table.changes(with_held=True):
            if kind == "push":
                yield _entry(_ChangeKind.PUSH, name, value or b"")
            elif kind == "pop":
                yield _entry(_ChangeKind.POP, name)
            elif value is None:
                yield _entry(_ChangeKind.DELETE, name)
            elif name in holders:
                yield _entry(_ChangeKind.HOLD, name, value, holders[name])
            elif suffix := self._table.appended(name):  # a value that grows is not written again and again
                yield _entry(_ChangeKind.APPEND, name, suffix)
            else:
                yield _entry(_ChangeKind.SET, name, value)

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
            kind, name_bytes, value_bytes, number = _ENTRY_HEAD.unpack_from(record, at)
            at += _ENTRY_HEAD.size
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
                case _ChangeKind.PUSH:
                    table.push(name, value)
                case _ChangeKind.POP:
                    table.pop(name)
                case _ChangeKind.HOLD:
                    table.hold(name, value, number)
                    self._highest = max(self._highest, number)
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
        pause_s = READ_PAUSE_S
        while True:
            # Not during the pause: another thread may make the change that this one waits for.
            found = self._query_table(query, names)
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            if found is not None or left_s <= 0:
                return found
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_READ_PAUSE_S)

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


# The log


class FileLog:
    """The records of the file at `path`, read once each.

    Raises UsageError if the path cannot be a store, PeerLostError if the file can no longer be read or written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = _open(path)
        self._identity = file_identity(self._fd)
        self._end = 0  # the end of the records that were read or written

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            close_own(self._fd, self._identity)
            self._fd = -1

    @property
    def size_bytes(self) -> int:
        """The size of the part of the file that was read or written."""
        return self._end

    @contextmanager
    def locked(self, exclusive: bool) -> Iterator[bool]:
        """Lock the file against writers, or against readers, too; yields whether all records must be read again."""
        is_reset = self._acquire(exclusive)
        try:
            yield is_reset
        except OSError as error:
            raise self._lost(error) from None
        finally:
            with suppress(OSError):  # the file system is gone: so is the lock
                _unlock(self._fd)

    def _use_file(self, fd: int) -> None:
        self._fd, self._identity = fd, file_identity(fd)

    def _acquire(self, exclusive: bool) -> bool:
        if not is_own(self._fd, self._identity):
            raise PeerLostError(f"cannot use the store at file:{self.path}: the program has closed its file")
        is_reset = self._end == 0
        while True:
            replacement = None
            try:
                _lock(self._fd, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, self.path)
                replacement = self._replacement(exclusive)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    with suppress(OSError):
                        _unlock(self._fd)
                    raise self._lost(error) from None
                # A file server forgets a file that another machine has replaced.
                replacement = _open(self.path)
            except PeerLostError:
                with suppress(OSError):
                    _unlock(self._fd)
                raise
            if replacement is None:
                return is_reset
            os.close(self._fd)
            self._use_file(replacement)
            self._end, is_reset = 0, True

    def reset(self) -> None:
        """Read from the first record next time."""
        self._end = 0

    def read_records(self, exclusive: bool) -> list[bytes]:
        """Return the new records. Call while locked; with an exclusive lock it repairs the end of the file."""
        size = os.fstat(self._fd).st_size
        if size < _BEGIN:
            if not (_MAGIC + _CURRENT).startswith(os.pread(self._fd, _BEGIN, 0)):
                raise self._foreign()
            if exclusive:
                self._write(_MAGIC + _CURRENT, 0)
                self._end = _BEGIN
            return []
        if self._end == 0:
            if os.pread(self._fd, len(_MAGIC), 0) != _MAGIC:
                raise self._foreign()
            self._end = _BEGIN
        if size < self._end:
            raise PeerLostError(f"the store at file:{self.path} was truncated by another process")
        records = list(self._parse(self._read(self._end, size - self._end))) if size > self._end else []
        if exclusive and size > self._end:
            os.ftruncate(self._fd, self._end)
        return records

    def append_record(self, payload: bytes) -> None:
        """Append a record; or raise PeerLostError and write nothing. Call while locked for writing, after reading."""
        record = _record(payload)
        try:
            self._write(record, self._end)
        except OSError as error:
            with suppress(OSError):  # otherwise the next writer cuts it off
                os.ftruncate(self._fd, self._end)
            raise self._lost(error) from None
        self._end += len(record)

    def replace_records(self, payloads: Iterator[bytes]) -> None:
        """Replace all records, if there is room. Call while locked for writing; ends the lock."""
        path = self.path + ".new"
        fd = -1
        try:
            fd = create_anew(path, os.O_RDWR, 0o600)
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            end = _write_all(fd, _MAGIC + _CURRENT, 0)
            for payload in payloads:
                end = _write_all(fd, _record(payload), end)
            os.fsync(fd)
            os.pwrite(self._fd, _REPLACED, len(_MAGIC))
            os.rename(path, self.path)
        except OSError:  # the file stays; a mark without a replacement has no effect
            if fd >= 0:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(path)
            return
        os.close(self._fd)
        self._use_file(fd)
        self._end = end

    def _replacement(self, exclusive: bool) -> int | None:
        """Return a descriptor of the new file if this one, which is locked, was replaced."""
        status = os.fstat(self._fd)
        if os.pread(self._fd, len(_REPLACED), len(_MAGIC)) == _REPLACED:
            fd = _open(self.path)
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != (status.st_dev, status.st_ino):
                return fd
            os.close(fd)
            if exclusive:
                os.pwrite(self._fd, _CURRENT, len(_MAGIC))
        elif status.st_nlink == 0:
            raise PeerLostError(f"the store at file:{self.path} is gone: its file was removed")
        return None

    def _read(self, start: int, count: int) -> bytes:
        parts = []
        while count > 0 and (part := os.pread(self._fd, count, start)):
            parts.append(part)
            start += len(part)
            count -= len(part)
        return b"".join(parts)

    def _parse(self, text: bytes) -> Iterator[bytes]:
        at = 0
        while at + _RECORD_HEAD_BYTES <= len(text):
            length, checksum = _RECORD_HEAD.unpack_from(text, at)
            if (
                zlib.crc32(text[at : at + _RECORD_HEAD.size])
                != _CHECK.unpack_from(text, at + _RECORD_HEAD.size)[0]
            ):
                if not text[at:].strip(b"\0"):  # the machine died before it wrote the data
                    return
                raise self._damaged()
            end = at + _RECORD_HEAD_BYTES + length
            if end > len(text):
                return
            payload = text[at + _RECORD_HEAD_BYTES : end]
            if zlib.crc32(payload) != checksum:
                raise self._damaged()
            self._end += end - at
            at = end
            yield payload

    def _write(self, text: bytes, start: int) -> None:
        _write_all(self._fd, text, start)

    def _lost(self, error: OSError) -> PeerLostError:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "; nothing has changed, and it works again when there is room"
        return PeerLostError(f"cannot use the store at file:{self.path}: {error.strerror}{hint}")

    def _damaged(self) -> PeerLostError:
        return PeerLostError(f"the store at file:{self.path} is damaged at byte {self._end}; remove the file")

    def _foreign(self) -> UsageError:
        if os.pread(self._fd, len(_NAME), 0) == _NAME:
            return UsageError(
                f"the file {self.path} is a store of another version of Ronde; if no job uses it, remove it and "
                f"{self.path}.alive, or give the store another path"
            )
        return UsageError(f"the file {self.path} is not a store; give the store another path")


class LiveClients:
    """The file at `path`, in which every living client has locked the byte at its number.

    One descriptor has the lock of this client and checks the locks of others. A forked child must close it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self.number = 0

    def claim_number(self, number: int) -> None:
        """Lock the first free number from this one on. Raises UsageError if the path cannot be used.

        A number that is not free belongs to a client of an earlier store at this path.
        """
        self._open_file()
        while not _is_locked_now(self._fd, fcntl.F_WRLCK, self._path, number):
            number += 1
        self.number = number

    def is_dead(self, number: int) -> bool:
        """Return whether the client with this number has died."""
        if number == self.number:
            return False
        self._open_file()
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, question))[0] == fcntl.F_UNLCK)

    def close(self) -> None:
        """Give up the number. A second call does nothing."""
        if self._fd >= 0:
            close_own(self._fd, self._identity)
        self._fd, self.number = -1, 0

    def _open_file(self) -> None:
        if self._fd < 0:
            self._fd = _open(self._path)
            self._identity = file_identity(self._fd)


def _record(payload: bytes) -> bytes:
    head = _RECORD_HEAD.pack(len(payload), zlib.crc32(payload))
    return head + _CHECK.pack(zlib.crc32(head)) + payload


def _write_all(fd: int, text: bytes, start: int) -> int:
    """Write the text at `start`; return its end."""
    rest = memoryview(text)
    while rest:
        written = os.pwrite(fd, rest, start)
        rest = rest[written:]
        start += written
    return start


def _open(path: str) -> int:
    try:
        return open_kept(path)
    except OSError as error:
        raise UsageError(f"the store's file {path} cannot be opened for writing: {error.strerror}") from None


def _lock(fd: int, kind: int, path: str) -> None:
    """Lock the file, polling: the kernel can wait for a lock, but not for a limited time."""
    deadline_ns = 0
    pause_s = LOCK_PAUSE_S
    while not _is_locked_now(fd, kind, path, _MUTEX):
        now_ns = time.monotonic_ns()
        deadline_ns = deadline_ns or now_ns + LOCK_NS
        if now_ns > deadline_ns:
            raise PeerLostError(
                f"another process has kept the store at file:{path} locked for {LOCK_NS / 1e9:g} s; it may be stopped"
            )
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, LONGEST_LOCK_PAUSE_S)


def _is_locked_now(fd: int, kind: int, path: str, start: int) -> bool:
    """Try to lock the byte at `start`; return whether that worked, or another client has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
        return True
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
            raise UsageError(f"{path} is on a file system that cannot lock it: {error.strerror}") from None
        return False


def _unlock(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, _MUTEX, 1, 0))


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
