"""A store inside one process, for ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ronde.errors import UsageError
from ronde.stores.store import check_key, check_value, missing_keys_error
from ronde.stores.table import Table, TableStore

__all__ = ["MemoryStore"]

Found = TypeVar("Found")


class _Content:
    """The content that clients of a store share: the table, and the waiting poppers by queue. `changed` guards it."""

    def __init__(self) -> None:
        self.table = Table()
        self.changed = threading.Condition()
        self.poppers: dict[bytes, deque[object]] = {}


class MemoryStore(TableStore):
    """The `Store` of one process. Its threads may share the object; a waiting thread does not block the others.

    `fork` returns another client of the same content; the keys that a client holds go when it is closed.
    """

    def __init__(self) -> None:
        self._content = _Content()
        self._open = True

    @property
    def address(self) -> str:
        return "memory"

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        encoded, me = check_key(queue), object()
        content = self._content
        with content.changed:
            line = content.poppers.setdefault(encoded, deque())
            line.append(me)
            try:
                value = self._wait_until(
                    lambda table: table.pop(encoded) if line[0] is me else None, (), timeout_ns
                )
            finally:
                line.remove(me)
                if not line:
                    del content.poppers[encoded]
                content.changed.notify_all()  # another thread is the first now
        if value is None:
            raise missing_keys_error(queue, self.address, timeout_ns)
        return value

    def hold(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)
        self._change_table(lambda table: table.hold(encoded, value, self), [encoded])

    def fork(self) -> MemoryStore:
        self._query_table(lambda _: None, ())  # raises if closed
        other = MemoryStore()
        other._content = self._content
        return other

    def close(self) -> None:
        with self._content.changed:
            if self._open:
                self._change_table(lambda table: table.release_holder(self), None)
            self._open = False

    def _query_table(self, query: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        with self._content.changed:
            if not self._open:
                raise UsageError("this client of the store in memory has been closed")
            return query(self._content.table)

    def _change_table(self, change: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        with self._content.changed:
            found = self._query_table(change, names)
            self._content.changed.notify_all()
            return found

    def _wait_until(
        self, query: Callable[[Table], Found | None], names: Sequence[bytes], timeout_ns: int
    ) -> Found | None:
        deadline_ns = time.monotonic_ns() + timeout_ns
        with self._content.changed:
            while (found := self._query_table(query, names)) is None:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    break
                self._content.changed.wait(min(left_ns / 1e9, threading.TIMEOUT_MAX))
            return found
