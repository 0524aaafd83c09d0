"""Values of any size in a store, in pieces that a store takes."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import BinaryIO

from ronde.stores.base import VALUE_LIMIT_BYTES, Store

__all__ = ["delete_large", "get_large", "put_large"]

PIECES_AT_ONCE = 16  # of 1 MiB: an answer of a store has a limit, too


def put_large(store: Store, key: str, value: bytes | BinaryIO) -> None:
    """Write the value, or the rest of the file, under the key. Who waits for the key then finds all of it."""
    file = io.BytesIO(value) if isinstance(value, bytes) else value
    count = 0
    while piece := file.read(VALUE_LIMIT_BYTES):
        store.set(_piece(key, count), piece)
        count += 1
    store.set(key, str(count).encode())


def get_large(store: Store, key: str, timeout_ns: int) -> Iterator[bytes]:
    """Return the pieces of the value. Waits for the key here, and raises TimeoutError if nobody writes it in time."""
    deadline_ns = time.monotonic_ns() + timeout_ns
    count = int(store.get(key, timeout_ns))

    def pieces() -> Iterator[bytes]:
        for first in range(0, count, PIECES_AT_ONCE):
            keys = [_piece(key, number) for number in range(first, min(first + PIECES_AT_ONCE, count))]
            yield from store.multi_get(keys, max(1, deadline_ns - time.monotonic_ns()))

    return pieces()


def delete_large(store: Store, key: str) -> None:
    """Delete the value."""
    store.delete_key(key)
    store.delete_prefix(f"{key}/")


def _piece(key: str, number: int) -> str:
    return f"{key}/{number}"
