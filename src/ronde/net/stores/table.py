"""The content of a store: keys, queues and who holds what, without waiting, shared by all stores of our own.

Who serves a table wakes those who wait. What an operation has changed is clear from its arguments; the two that
change what only the table knows, `delete_prefix` and `release_holder`, say what that was.

Between `begin_changes` and `keep_changes` or `undo_changes` the table remembers how it was, for a server that writes to a journal first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ronde.errors import UsageError
from ronde.net.stores.base import VALUE_LIMIT_BYTES

__all__ = ["Table"]

NUMBER_BYTES = 41  # of the longest that counts as a number


class Table:
    """Keys, values and queues of one store, as `Store` describes them; not thread-safe, nothing waits.

    Queues have names of their own. A holder is any object that stands for one client.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}  # none of them is empty
        self._holders: dict[bytes, Any] = {}
        self._held: dict[Any, dict[bytes, None]] = {}
        self._undo: list[tuple[str, bytes, Any]] | None = None

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
        total = int(text) + amount
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        value = self._values.get(key, b"")
        if value != expected:
            return value
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
        """Raises UsageError if the value gets too long."""
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
        """Remove what begins so; return the keys and the queues that were there."""
        keys = [key for key in self._values if key.startswith(prefix)]
        queues = [queue for queue in self._queues if queue.startswith(prefix)]
        for key in keys:
            self.delete(key)
        for queue in queues:
            while self.pop(queue) is not None:
                pass
        return keys, queues

    def differing(self, known: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        """Return the keys whose values are not the known ones, with their values; None is a key that is not there."""
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

    # Keys that somebody holds: whoever held last. One that is deleted is held no longer; other changes leave it so.

    def hold(self, key: bytes, value: bytes, holder: Any) -> None:
        self._end_hold(key)
        self._holders[key] = holder
        self._held.setdefault(holder, {})[key] = None
        self.set(key, value)

    def release_holder(self, holder: Any) -> list[bytes]:
        """Remove all keys that the holder holds, and return them."""
        keys = list(self._held.get(holder, ()))
        for key in keys:
            self.delete(key)
        return keys

    def holders(self) -> Mapping[bytes, Any]:
        """Return who holds which key."""
        return self._holders

    def _end_hold(self, key: bytes) -> None:
        holder = self._holders.pop(key, None)
        if holder is not None:
            held = self._held[holder]
            del held[key]
            if not held:
                del self._held[holder]

    # All of it

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return all keys that nobody holds, with their values."""
        return ((key, value) for key, value in self._values.items() if key not in self._holders)

    def queues(self) -> Iterator[tuple[bytes, Iterable[bytes]]]:
        """Return all queues with their values in order."""
        return iter(self._queues.items())

    def begin_changes(self) -> None:
        """Start to remember what changes."""
        self._undo = []

    def changes(self) -> Iterator[tuple[str, bytes, bytes | None]]:
        """Return what has changed since `begin_changes`, held keys left out.

        That is ("key", key, value it has now or None) in any order, and ("push" or "pop", queue, value) in theirs.
        """
        changes = self._undo or []
        for key in dict.fromkeys(name for kind, name, _ in changes if kind == "key"):
            yield "key", key, None if key in self._holders else self._values.get(key)
        for kind, name, value in changes:
            if kind != "key":
                yield kind, name, value

    def keep_changes(self) -> None:
        """Let all changes since `begin_changes` stand."""
        self._undo = None

    def undo_changes(self) -> None:
        """Take back all changes since `begin_changes`, but for who holds what."""
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
