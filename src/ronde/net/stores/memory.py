"""A store inside one process, for ranks that are threads."""

from __future__ import annotations

import threading
import time

from ronde.net.stores.base import check_key, check_value, waited_in_vain
from ronde.net.stores.table import Table

__all__ = ["MemoryStore"]


class MemoryStore:
    """The `Store` of one process; all its threads share the object, and a waiting one does not hold up the others."""

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        return "memory"

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._table.set(check_key(key), bytes(check_value(key, value)))
            self._changed.notify_all()

    def get(self, key: str, timeout_ns: int) -> bytes:
        encoded = check_key(key)
        deadline_ns = time.monotonic_ns() + timeout_ns
        with self._changed:
            while (value := self._table.get(encoded)) is None:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise waited_in_vain(key, self.address, timeout_ns)
                self._changed.wait(left_ns / 1e9)
            return value

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        deadline_ns = time.monotonic_ns() + timeout_ns
        for key in keys:
            self.get(key, max(0, deadline_ns - time.monotonic_ns()))

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = self._table.add(check_key(key), amount)
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            value = self._table.compare_set(check_key(key), expected, bytes(check_value(key, desired)))
            self._changed.notify_all()
            return value

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._table.delete(check_key(key))

    def close(self) -> None:
        pass
