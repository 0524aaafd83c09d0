"""A file of a snapshot: its format, the bytes to be written while the program goes on, and whether it can be trusted.

    ronde snapshot 1        a line
    8 bytes                 the length of the header, little-endian
    the header              JSON: the commit, and for each part its name, its description and its number of bytes
    the data                the bytes of all parts
    32 bytes                SHA-256 of everything before

Arrays are no pickles (`payloads`), so a file of another user does no harm. Pickles are read only if no other user can
have decided on the content of the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.checkpoints import require_own
from ronde.elastic.payloads import pack, unpack
from ronde.errors import ProtocolError, UsageError
from ronde.trusted_files import create_anew
from ronde.typed_json import Natural, TypedJson

__all__ = ["SnapshotFile", "read_snapshot_file"]

_MAGIC = b"ronde snapshot 1\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_PIECE_BYTES = 1 << 20  # 0.1 ms to copy


@dataclass(frozen=True)
class _PartHeader:
    name: str
    text: str
    num_bytes: Natural


@dataclass(frozen=True)
class _Header:
    commit: Natural
    parts: tuple[_PartHeader, ...]


_HEADER: TypedJson[_Header] = TypedJson(_Header, "header of a snapshot")


class SnapshotFile:
    """A file that is to be written from the memory of a commit. One thread writes, another may `detach`.

    Args:
        name: the part of the checkpoint.
        commit: the number of the commit.
        payloads: by the name of the part of the state.

    Raises:
        UsageError: a payload contains an object that cannot be pickled.
    """

    def __init__(self, name: str, commit: int, payloads: Mapping[str, object]) -> None:
        self.name = name
        packed = {key: pack(payload) for key, payload in payloads.items()}
        header = _HEADER.encode(
            _Header(
                commit, tuple(_PartHeader(key, each.text, each.num_bytes) for key, each in packed.items())
            )
        )
        self._head = _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header
        self._rest = deque(
            buffer[begin : begin + _PIECE_BYTES]
            for each in packed.values()
            for buffer in each.buffers
            for begin in range(0, buffer.nbytes, _PIECE_BYTES)
        )
        self._lock = threading.Lock()

    def detach(self) -> None:
        """Copy what is not written yet: the memory of the commit is about to change."""
        with self._lock:
            self._rest = deque(memoryview(bytes(piece)) for piece in self._rest)

    def write(self, path: Path) -> None:
        """Write the file, readable for this user only. Raises OSError."""
        digest = hashlib.sha256()
        with open(create_anew(path, mode=0o600), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however that happens
            for piece in self._pieces():
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())

    def _pieces(self) -> Iterator[bytes]:
        """Yield copies, so that no piece changes between its checksum and its way to the disk."""
        yield self._head
        while True:
            with self._lock:
                if not self._rest:
                    return
                piece = bytes(self._rest.popleft())
            yield piece


def read_snapshot_file(path: Path, commit: int) -> dict[str, Any]:
    """Return the payloads of a file, by the name of the part.

    Raises OSError, ProtocolError if the file is not as it was written, and UsageError if another user can have decided
    on its content and it contains a pickle.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        danger = _danger(os.fstat(file.fileno()), path)
        data = file.read()
    content, digest = memoryview(data)[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not data.startswith(_MAGIC) or hashlib.sha256(content).digest() != digest:
        raise ProtocolError(f"{path} is damaged: its checksum is wrong")
    begin = len(_MAGIC) + _LENGTH_BYTES
    end = begin + int.from_bytes(content[len(_MAGIC) : begin], "little")
    header = _HEADER.decode(bytes(content[begin:end]))
    if header.commit != commit:
        raise ProtocolError(f"{path} contains commit {header.commit}")
    payloads = {}
    for part in header.parts:
        begin, end = end, end + part.num_bytes
        try:
            payloads[part.name] = unpack(part.text, content[begin:end], takes_pickles=danger is None)
        except UsageError:
            raise danger or UsageError(f"{path} contains a pickle") from None
    return payloads


def _danger(status: os.stat_result, path: Path) -> UsageError | None:
    """Return an error if another user can have decided on the content."""
    try:
        require_own(path.parent.stat(), path.parent, path.parent, "folder for snapshots")
        require_own(status, path, path.parent, "folder for snapshots")
    except UsageError as error:
        return error
    return None
