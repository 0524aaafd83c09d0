"""The journal of a served store: a file that restores the store after its server has died or moved.

    file   = header, records
    record = length (4 bytes), CRC-32 of the entries (4), CRC-32 of these eight (4), entries
    entry  = kind (1 byte), length of the name (2), length of the value (4), name, value

An entry has a new value, not a request, so the meaning of requests may change without the journal. A record has all
changes of one turn of the server. It is on the disk before the turn's answers leave, and counts as a whole or not at
all: a torn record at the end is of a server that died while writing, and is cut off. A broken record before the end is
damage, and an error.

Held keys are not in the journal. When the file has grown to several times the size of the content, the server writes
another one beside it, and renames that.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ronde.errors import UsageError
from ronde.stores.table import Table
from ronde.trusted_files import create_anew, open_kept

__all__ = ["Journal", "Remembered", "pack_changes", "pack_sessions", "read_journal"]

HEADER = b"ronde store journal, version 1\n"
SMALLEST_REWRITE_BYTES = 16 << 20
GROWTH = 4  # times the size of a new file
PIECE_BYTES = 1 << 20

_log = logging.getLogger(__name__)

Remembered = tuple[bytes, int, bytes]  # a session's id, its last number, and the answer

_RECORD = struct.Struct("!II")
_HEAD_SUM = struct.Struct("!I")
_HEAD_BYTES = _RECORD.size + _HEAD_SUM.size
_ENTRY = struct.Struct("!BHI")
_NUMBER = struct.Struct("!Q")
_KEY, _NO_KEY, _PUSH, _POP, _SESSION = 1, 2, 3, 4, 5
_KINDS = {"push": _PUSH, "pop": _POP}


def pack_changes(changes: Iterable[tuple[str, bytes, bytes | None]]) -> bytes:
    """Return the entries for the changes of `Table.changes`."""
    pieces = []
    for kind, name, value in changes:
        code = _KINDS.get(kind) or (_NO_KEY if value is None else _KEY)
        pieces.append(_entry(code, name, b"" if code == _POP else value or b""))
    return b"".join(pieces)


def pack_sessions(sessions: Iterable[Remembered]) -> bytes:
    """Return the entries for the last answers of sessions."""
    return b"".join([_entry(_SESSION, id, _NUMBER.pack(number) + answer) for id, number, answer in sessions])


def _entry(kind: int, name: bytes, value: bytes) -> bytes:
    return _ENTRY.pack(kind, len(name), len(value)) + name + value


def _pack_all(table: Table, sessions: Iterable[Remembered]) -> Iterator[bytes]:
    for key, value in table.items():
        yield _entry(_KEY, key, value)
    for queue, values in table.queues():
        for value in values:
            yield _entry(_PUSH, queue, value)
    yield pack_sessions(sessions)


def read_journal(path: Path, table: Table) -> tuple[list[Remembered], int]:
    """Fill the table from a journal; return the sessions, and the size of the valid part of the file in bytes.

    Raises UsageError if the file cannot be read or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the journal {path}: {error.strerror}") from None
    return _replay(data, path, table)


def _replay(data: bytes, path: Path, table: Table) -> tuple[list[Remembered], int]:
    if not data.startswith(HEADER):
        if HEADER.startswith(data):  # the server died while it created the file
            return [], 0
        raise UsageError(f"{path} is not a journal of a store, or comes from another version of Ronde")
    sessions: dict[bytes, Remembered] = {}
    place = len(HEADER)
    while place < len(data):
        end = _end_of_record(data, place)
        if end == 0:
            break
        if end < 0:
            raise UsageError(
                f"the journal {path} is damaged at byte {place} of {len(data)}; use an undamaged copy of it"
            )
        for kind, name, value in _entries(data, place + _HEAD_BYTES, end):
            if kind == _SESSION:
                sessions.pop(name, None)
                sessions[name] = name, _NUMBER.unpack_from(value)[0], value[_NUMBER.size :]
            else:
                _apply(table, kind, name, value)
        place = end
    return list(sessions.values()), place


def _end_of_record(data: bytes, place: int) -> int:
    """Return the end of the record; 0 if the record is torn, -1 if it is damaged."""
    begin = place + _HEAD_BYTES
    if len(data) < begin:
        return 0
    head = data[place : place + _RECORD.size]
    length, checksum = _RECORD.unpack(head)
    if zlib.crc32(head) != _HEAD_SUM.unpack_from(data, place + _RECORD.size)[0]:
        # The end is unknown. After a crash, a file system may have zeros at the end of the file.
        return 0 if not data[begin:].strip(b"\0") else -1
    end = int(begin + length)
    if end <= len(data) and zlib.crc32(memoryview(data)[begin:end]) == checksum:
        return end
    return 0 if not data[end:].strip(b"\0") else -1


def _entries(data: bytes, place: int, end: int) -> Iterator[tuple[int, bytes, bytes]]:
    while place < end:
        kind, name_length, length = _ENTRY.unpack_from(data, place)
        place += _ENTRY.size + name_length + length
        yield kind, data[place - length - name_length : place - length], data[place - length : place]


def _apply(table: Table, kind: int, name: bytes, value: bytes) -> None:
    if kind == _KEY:
        table.set(name, value)
    elif kind == _NO_KEY:
        table.delete(name)
    elif kind == _PUSH:
        table.push(name, value)
    elif kind == _POP:
        table.pop(name)


class Journal:
    """The journal at `path`, created if it does not exist. No other server may have it open.

    Call `load` first, then `write` with the changes of each turn, and `rewrite` when it `is_overgrown` or
    `is_doubtful`. Raises UsageError if the file cannot be used. `write` and `rewrite` raise OSError, and then leave the
    file as it was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = _open(path)
        self._size = 0
        self._rewritten_size = 0  # the size of the file when it was last rewritten
        self._is_doubtful = False  # whether the end of the file may differ from `_size`

    def load(self, table: Table) -> list[Remembered]:
        """Fill the table, and return the remembered sessions. Raises UsageError if the file is damaged."""
        sessions, self._size = read_journal(self._path, table)
        torn = os.fstat(self._fd).st_size - self._size
        if torn:
            _log.warning("cut %d bytes off the journal %s, which its server did not finish", torn, self._path)
        try:
            if self._size == 0:
                self._append_synced(HEADER)
            else:
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)
        except OSError as error:
            raise UsageError(f"cannot write the journal {self._path}: {error.strerror}") from None
        return sessions

    @property
    def is_empty(self) -> bool:
        """Whether the file has no records."""
        return os.fstat(self._fd).st_size <= len(HEADER)

    @property
    def is_overgrown(self) -> bool:
        """Whether it is time to rewrite the file."""
        return self._size > max(SMALLEST_REWRITE_BYTES, GROWTH * self._rewritten_size)

    @property
    def is_doubtful(self) -> bool:
        """Whether a write has failed, so that the end of the file is unknown: only `rewrite` helps."""
        return self._is_doubtful

    def write(self, entries: bytes) -> None:
        """Append one record, and force it to the disk."""
        self._append_synced(_record(entries))

    def rewrite(self, table: Table, sessions: Iterable[Remembered]) -> None:
        """Replace the file by one with only the present content."""
        new = self._path.with_name(self._path.name + ".new")
        fd = create_anew(new, os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = 0
            for piece in _pieces(table, sessions):
                _write_all(fd, piece)
                size += len(piece)
            os.fsync(fd)
            os.rename(new, self._path)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(new)
            raise
        os.close(self._fd)
        self._fd = fd
        self._size = self._rewritten_size = size
        self._is_doubtful = False
        _sync_folder(self._path)

    def close(self) -> None:
        """Close the file. A second call does nothing: its descriptor's number may be another file's then."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append_synced(self, data: bytes) -> None:
        try:
            _write_all(self._fd, data)
            os.fdatasync(self._fd)
        except OSError:
            # After a failed sync the content of the disk is unknown, so later records go to a new file.
            self._is_doubtful = True
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._size += len(data)


def _pieces(table: Table, sessions: Iterable[Remembered]) -> Iterator[bytes]:
    yield HEADER
    pending: list[bytes] = []
    size = 0
    for entry in _pack_all(table, sessions):
        pending.append(entry)
        size += len(entry)
        if size > PIECE_BYTES:
            yield _record(b"".join(pending))
            pending, size = [], 0
    if size:
        yield _record(b"".join(pending))


def _record(entries: bytes) -> bytes:
    head = _RECORD.pack(len(entries), zlib.crc32(entries))
    return head + _HEAD_SUM.pack(zlib.crc32(head)) + entries


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open(path: Path) -> int:
    """Return a descriptor of the locked file; try again if another server has replaced the file meanwhile."""
    while True:
        try:
            fd = open_kept(path)
        except OSError as error:
            raise UsageError(f"cannot open the journal {path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(fd)
            reason = "another store is using it" if isinstance(error, BlockingIOError) else error.strerror
            raise UsageError(f"cannot open the journal {path}: {reason}") from None
        os.close(fd)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot do this, and the file itself is safe
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
