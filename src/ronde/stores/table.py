"""The content of a store: keys, queues and holders, without waiting. All of Ronde's stores use it.

The store wakes waiting clients. The arguments of an operation show what it has changed, except for `delete_prefix` and
`release_holder`, which return that.

Between `begin_changes` and `keep_changes` or `undo_changes` the table can undo, for a server that writes to a journal
first. `TableStore` has the operations of a `Store` on a table in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ronde.errors import UsageError
from ronde.stores.store import (
    AMOUNT_DIGITS,
    AMOUNT_LIMIT,
    VALUE_LIMIT_BYTES,
    check_amount,
    check_key,
    check_value,
    key_list,
    missing_keys_error,
    missing_of,
)

__all__ = [
    "Table",
    "TableStore",
]

NUMBER_BYTES = AMOUNT_DIGITS + 1  # of the longest number, with its sign


class Table:
    """The keys, values and queues of one store, as `Store` describes them. Not thread-safe.

    Keys and queues have separate names. A holder is any object that stands for one client.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}  # none of them is empty
        self._holders: dict[bytes, Any] = {}
        self._held: dict[Any, dict[bytes, None]] = {}
        self._undo: list[tuple[str, bytes, Any]] | None = None

    @property
    def values(self) -> dict[bytes, bytes]:
        """The values by key; a change of them cannot be undone."""
        return self._values

    # Keys

    def set(self, key: bytes, value: bytes) -> None:
        if self._undo is not None:
            self._undo.append(("key", key, self._values.get(key)))
        self._values[key] = value

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        text = self._values.get(key, b"0")
        if len(text) > NUMBER_BYTES or not (text.isdigit() or text.removeprefix(b"-").isdigit()):
            raise UsageError(f"cannot add to {_shown(key)}: its value is not a number")
        if not -AMOUNT_LIMIT < amount < AMOUNT_LIMIT:
            check_amount(key.decode(errors="replace"), amount)
        total = int(text) + amount
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        value = self._values.get(key, b"")
        if value != expected:
            return value
        if desired != value or key not in self._values:  # else nothing changes, so that no store records it
            self.set(key, desired)
        return desired

    def delete(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        if self._holders:
            self._end_hold(key)
        if self._undo is not None:
            self._undo.append(("key", key, value))
        return True

    def check(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        return len(self._values) + len(self._queues)

    def append(self, key: bytes, value: bytes) -> None:
        """Append to the key's value. Raises UsageError if the value exceeds the limit."""
        old = self._values.get(key, b"")
        if len(old) + len(value) > VALUE_LIMIT_BYTES:
            raise UsageError(
                f"cannot append {len(value)} bytes to {_shown(key)}, which has {len(old)}: a store's value has "
                f"at most {VALUE_LIMIT_BYTES}"
            )
        self.set(key, old + value)

    def multi_get(self, keys: Iterable[bytes]) -> list[bytes] | None:
        """Return the values, or None if a key is missing."""
        found = []
        for key in keys:
            value = self._values.get(key)
            if value is None:
                return None
            found.append(value)
        return found

    def multi_set(self, values: Mapping[bytes, bytes]) -> None:
        for key, value in values.items():
            self.set(key, value)

    def delete_prefix(self, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """Delete the keys and queues with this prefix, and return them."""
        keys = [key for key in self._values if key.startswith(prefix)]
        queues = [queue for queue in self._queues if queue.startswith(prefix)]
        for key in keys:
            self.delete(key)
        for queue in queues:
            while self.pop(queue) is not None:
                pass
        return keys, queues

    def differing(self, known: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        """Return the keys whose values differ from the known ones, with their values; None stands for an absent key."""
        return {key: self._values.get(key) for key, value in known.items() if self._values.get(key) != value}

    # Queues

    def push(self, queue: bytes, value: bytes) -> None:
        if queue not in self._queues:
            self._queues[queue] = deque()
        self._queues[queue].append(value)
        if self._undo is not None:
            self._undo.append(("push", queue, value))

    def pop(self, queue: bytes) -> bytes | None:
        """Return the first value of the queue, or None if it is empty."""
        values = self._queues.get(queue)
        if values is None:
            return None
        value = values.popleft()
        if not values:
            del self._queues[queue]
        if self._undo is not None:
            self._undo.append(("pop", queue, value))
        return value

    def queue_len(self, queue: bytes) -> int:
        return len(self._queues.get(queue, ()))

    # Held keys. The last client to hold a key holds it; only a deletion ends that.

    def hold(self, key: bytes, value: bytes, holder: Any) -> None:
        self._end_hold(key)
        self._holders[key] = holder
        self._held.setdefault(holder, {})[key] = None
        self.set(key, value)

    def release_holder(self, holder: Any) -> list[bytes]:
        """Delete all keys that the holder holds, and return them."""
        keys = list(self._held.get(holder, ()))
        for key in keys:
            self.delete(key)
        return keys

    def holders(self) -> Mapping[bytes, Any]:
        """Return the holders, by key."""
        return self._holders

    def _end_hold(self, key: bytes) -> None:
        holder = self._holders.pop(key, None)
        if holder is not None:
            held = self._held[holder]
            del held[key]
            if not held:
                del self._held[holder]

    # The whole content

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return all keys without a holder, with their values."""
        return ((key, value) for key, value in self._values.items() if key not in self._holders)

    def queues(self) -> Iterator[tuple[bytes, Iterable[bytes]]]:
        """Return all queues with their values in order."""
        return iter(self._queues.items())

    def begin_changes(self) -> None:
        """Begin to record changes."""
        self._undo = []

    def changes(self, with_held: bool = False) -> Iterator[tuple[str, bytes, bytes | None]]:
        """Return the changes since `begin_changes`.

        First ("key", key, present value or None) in any order, then ("push" or "pop", queue, value) in their order.
        A held key counts as absent, unless `with_held`.
        """
        changes = self._undo or []
        for key in dict.fromkeys(name for kind, name, _ in changes if kind == "key"):
            is_absent = not with_held and key in self._holders
            yield "key", key, None if is_absent else self._values.get(key)
        for kind, name, value in changes:
            if kind != "key":
                yield kind, name, value

    def appended(self, key: bytes) -> bytes | None:
        """Return what the changes since `begin_changes` appended to the key's value; None: they did something else."""
        changes = self._undo or ()
        old: bytes | None = next((old for kind, name, old in changes if kind == "key" and name == key), None)
        value = self._values.get(key)
        return value[len(old) :] if old and value is not None and value.startswith(old) else None

    def keep_changes(self) -> None:
        """Keep all changes since `begin_changes`, and stop recording."""
        self._undo = None

    def undo_changes(self) -> None:
        """Undo all changes since `begin_changes` except those of holders."""
        changes, self._undo = self._undo or [], None
        for kind, name, old in reversed(changes):
            if kind == "push":
                self._queues[name].pop()
                if not self._queues[name]:
                    del self._queues[name]
            elif kind == "pop":
                self._queues.setdefault(name, deque()).appendleft(old)
            elif old is None:
                self._values.pop(name, None)
            else:
                self._values[name] = old


def _shown(key: bytes) -> str:
    return repr(key.decode(errors="replace"))


Found = TypeVar("Found")


class TableStore(ABC):
    """The operations of a `Store` with the whole table in this process, by three functions of a subclass.

    `names`, in these three: the keys that the function reads or changes, None: any.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the store, for messages."""

    @abstractmethod
    def _query_table(self, query: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        """Return the result of the query."""

    @abstractmethod
    def _change_table(self, change: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        """Change the table, wake waiting clients, and return the result. If this raises, nothing has changed."""

    @abstractmethod
    def _wait_until(
        self, query: Callable[[Table], Found | None], names: Sequence[bytes], timeout_ns: int
    ) -> Found | None:
        """Return the result of the query as soon as it is not None, or None after the timeout."""

    def get(self, key: str, timeout_ns: int) -> bytes:
        encoded = check_key(key)
        value = self._wait_until(lambda table: table.get(encoded), [encoded], timeout_ns)
        if value is None:
            raise missing_keys_error(key, self.address, timeout_ns)
        return value

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        missing = {check_key(key): key for key in key_list(keys)}

        def query(table: Table) -> bool | None:
            for name in [name for name in missing if table.get(name) is not None]:
                del missing[name]
            return not missing or None

        if not self._wait_until(query, list(missing), timeout_ns):
            raise missing_keys_error(missing.values(), self.address, timeout_ns)

    def check(self, keys: Sequence[str]) -> bool:
        encoded = [check_key(key) for key in key_list(keys)]
        return self._query_table(lambda table: table.check(encoded), encoded)

    def num_keys(self) -> int:
        return self._query_table(Table.num_keys, None)

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        encoded = [check_key(key) for key in key_list(keys)]
        values = self._wait_until(lambda table: table.multi_get(encoded), encoded, timeout_ns)
        if values is None:
            raise missing_keys_error(missing_of(keys, self.check), self.address, timeout_ns)
        return values

    def queue_len(self, queue: str) -> int:
        encoded = check_key(queue)
        return self._query_table(lambda table: table.queue_len(encoded), ())

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        encoded = {check_key(key): value for key, value in known.items()}
        found = self._wait_until(lambda table: table.differing(encoded) or None, list(encoded), timeout_ns)
        return {key.decode(): value for key, value in (found or {}).items()}

    def set(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)
        self._change_table(lambda table: table.set(encoded, value), [encoded])

    def add(self, key: str, amount: int) -> int:
        encoded = check_key(key)
        return self._change_table(lambda table: table.add(encoded, amount), [encoded])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        encoded = check_key(key)
        expected, desired = check_value(key, expected), check_value(key, desired)
        return self._change_table(lambda table: table.compare_set(encoded, expected, desired), [encoded])

    def delete_key(self, key: str) -> bool:
        encoded = check_key(key)
        return self._change_table(lambda table: table.delete(encoded), [encoded])

    def append(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)
        self._change_table(lambda table: table.append(encoded, value), [encoded])

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        encoded = {check_key(key): check_value(key, value) for key, value in values.items()}
        self._change_table(lambda table: table.multi_set(encoded), encoded)

    def delete_prefix(self, prefix: str) -> int:
        encoded = check_key(prefix)
        keys, queues = self._change_table(lambda table: table.delete_prefix(encoded), None)
        return len(keys) + len(queues)

    def queue_push(self, queue: str, value: bytes) -> None:
        encoded, value = check_key(queue), check_value(queue, value)
        self._change_table(lambda table: table.push(encoded, value), ())
