"""The interface of a store: a small shared map from names to bytes, where processes meet before they are connected.

Waiting needs no polling by the caller: `get`, `wait`, `queue_pop` and `watch` return as soon as they can, and `hold`
makes the death of a client visible to `watch`.

The suite tests/conformance/test_stores.py defines what every store must do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ronde.errors import TimeoutError, UsageError

__all__ = [
    "KEY_LIMIT_BYTES",
    "VALUE_LIMIT_BYTES",
    "Store",
    "check_key",
    "check_value",
    "several",
    "waited_in_vain",
]

KEY_LIMIT_BYTES = 1024
VALUE_LIMIT_BYTES = 1 << 20


class Store(Protocol):
    """A map from keys (text of 1 to 1,024 bytes) to values (at most 1 MiB). Every method is atomic.

    All methods raise UsageError for a key or value outside its limits, and PeerLostError if the store is gone.
    One call at a time: a second thread waits for the first one's answer.
    """

    @property
    def address(self) -> str:
        """The address of the store, for messages."""

    def set(self, key: str, value: bytes) -> None:
        """Set the key to the value, whether or not it had one."""

    def get(self, key: str, timeout_ns: int) -> bytes:
        """Return the key's value, waiting until it has one. Raises TimeoutError; a timeout of 0 does not wait."""

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        """Return once each key has existed. Raises TimeoutError; a timeout of 0 does not wait."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number under the key (0 if there is none), kept as decimal text; return the sum.

        Raises UsageError if the value is not a number.
        """

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key to `desired` if its value is `expected`; return the value that it then has.

        An absent key counts as having the value b"".
        """

    def delete_key(self, key: str) -> bool:
        """Delete the key; return whether it existed."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key exists now."""

    def num_keys(self) -> int:
        """Return the number of keys in the whole store, of all clients; a queue counts while it is not empty."""

    def append(self, key: str, value: bytes) -> None:
        """Append to the key's value, b"" if it has none. Raises UsageError if the value exceeds the limit."""

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        """Return the values of all keys at one moment, waiting until each has one. Raises TimeoutError."""

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        """Set all keys at one moment."""

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys and queues with this prefix at one moment; return how many there were.

        A prefix has the limits of a key.
        """

    # Queues have separate names: the queue "a" is independent of the key "a".

    def queue_push(self, queue: str, value: bytes) -> None:
        """Append the value to the queue."""

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        """Remove and return the first value of the queue, waiting until there is one.

        If one process serves the store (memory, TCP), waiting clients are served in the order of their arrival;
        elsewhere the fastest gets the value. Raises TimeoutError; a timeout of 0 does not wait.
        """

    def queue_len(self, queue: str) -> int:
        """Return the number of values in the queue."""

    # Watched and held keys

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        """Return the keys whose values differ from the known ones, with their values, as soon as there is one.

        None stands for an absent key. Returns an empty dict if no key has changed before the timeout.
        """

    def hold(self, key: str, value: bytes) -> None:
        """Set the key until this client closes, dies or loses its connection.

        The last client to hold a key holds it; `delete_key` ends that, other changes of the value do not. A client that
        reconnects holds its keys again. The death of a client shows at once or after a lease, depending on the store.
        """

    def fork(self) -> Store:
        """Return another client of the same store, for another thread; the caller closes it."""

    def close(self) -> None:
        """Close this client. Its held keys go, all others stay. A second call does nothing.

        Another thread that waits in a call of this client gets a UsageError.
        """


def check_key(key: str) -> bytes:
    """Return the key as bytes. Raises UsageError if it is not text, empty or too long."""
    try:
        encoded = key.encode()
    except (AttributeError, UnicodeEncodeError):
        raise UsageError(f"a store's key is text that can be written as UTF-8, not {key!r}") from None
    if not 0 < len(encoded) <= KEY_LIMIT_BYTES:
        raise UsageError(f"a store's key has 1 to {KEY_LIMIT_BYTES} bytes; {key[:40]!r} has {len(encoded)}")
    return encoded


def several(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list. Raises UsageError for a single key, whose letters would count as keys."""
    if isinstance(keys, str):
        raise UsageError(f"keys are a list: write [{keys[:40]!r}], not {keys[:40]!r}")
    return list(keys)


def check_value(key: str, value: bytes) -> bytes:
    """Return the value as bytes. Raises UsageError if it is not bytes-like, or too long."""
    if type(value) is not bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            kind = type(value).__name__
            raise UsageError(f"a store's value is bytes; that of {key!r} is {kind}: encode it")
        value = bytes(value)
    if len(value) > VALUE_LIMIT_BYTES:
        raise UsageError(
            f"a store's value has at most {VALUE_LIMIT_BYTES} bytes; that of {key!r} has {len(value)}"
        )
    return value


def waited_in_vain(key: str, address: str, timeout_ns: int) -> TimeoutError:
    """Return the error for a key that did not appear in time."""
    message = f"waited {timeout_ns / 1e9:g} s for {key!r} in the store at {address}"
    return TimeoutError(message, operation="store", waited_ns=timeout_ns)
