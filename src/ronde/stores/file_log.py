"""The file of a `FileStore`: a log of changes by processes that lock the file and may die at any moment.

The rules:
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
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ronde.errors import PeerLostError, UsageError
from ronde.net.descriptors import close_own, file_identity, is_own
from ronde.trusted_files import create_anew, open_kept

__all__ = ["FileLog", "LiveClients"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.00002, 0.005
LOCK_NS = 30 * 10**9  # how long another client may keep the lock, for which it needs well under a millisecond

_MAGIC = b"a store of Ronde, 1 "
_CURRENT, _REPLACED = b".\n", b"!\n"
_BEGIN = len(_MAGIC) + len(_CURRENT)
_MUTEX = 1 << 62
_HEAD = struct.Struct("!II")
_CHECK = struct.Struct("!I")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_FLOCK = struct.Struct("@hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid


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
        anew = self._acquire(exclusive)
        try:
            yield anew
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
        anew = self._end == 0
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
                return anew
            os.close(self._fd)
            self._use_file(replacement)
            self._end, anew = 0, True

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
        while at + _HEAD_BYTES <= len(text):
            length, checksum = _HEAD.unpack_from(text, at)
            if zlib.crc32(text[at : at + _HEAD.size]) != _CHECK.unpack_from(text, at + _HEAD.size)[0]:
                if not text[at:].strip(b"\0"):  # the machine died before it wrote the data
                    return
                raise self._damaged()
            end = at + _HEAD_BYTES + length
            if end > len(text):
                return
            payload = text[at + _HEAD_BYTES : end]
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
    head = _HEAD.pack(len(payload), zlib.crc32(payload))
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
    pause_s = FIRST_PAUSE_S
    while not _is_locked_now(fd, kind, path, _MUTEX):
        now_ns = time.monotonic_ns()
        deadline_ns = deadline_ns or now_ns + LOCK_NS
        if now_ns > deadline_ns:
            raise PeerLostError(
                f"another process has kept the store at file:{path} locked for {LOCK_NS / 1e9:g} s; it may be stopped"
            )
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


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
