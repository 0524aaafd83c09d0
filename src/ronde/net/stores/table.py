"""The content of a store: the map and its operations without waiting, shared by all stores of our own."""

from __future__ import annotations

import re

from ronde.errors import UsageError

__all__ = ["Table"]


class Table:
    """Keys and values of one store, as `Store` describes them; not thread-safe, nothing waits."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        text = self._values.get(key, b"0")
        if not re.fullmatch(rb"-?\d{1,40}", text):
            raise UsageError(f"cannot add to {key.decode()!r}: its value is no number")
        total = int(text) + amount
        self._values[key] = b"%d" % total
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        value = self._values.get(key, b"")
        if value != expected:
            return value
        self._values[key] = desired
        return desired

    def delete(self, key: bytes) -> bool:
        return self._values.pop(key, None) is not None
