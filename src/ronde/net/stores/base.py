"""What a store is: a small map from names to bytes that processes share, where they meet before they are connected.

Nobody who waits polls: `get`, `wait`, `queue_pop` and `watch` return when it happens, and `hold` makes a death
something that can be watched.

One suite, tests/conformance/test_stores.py, says what every store must do.
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
        """Where the store is, for messages."""

    def set(self, key: str, value: bytes) -> None:
        """Give the key a value, whether or not it had one."""

    def get(self, key: str, timeout_ns: int) -> bytes:
        """Return the key's value, waiting until it has one. Raises TimeoutError; a timeout of 0 only looks."""

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        """Return once each key has been there. Raises TimeoutError; a timeout of 0 only looks."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number under the key (0 if there is none), kept as decimal text; return the sum.

        Raises UsageError if the value is no number.
        """

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key to `desired` if its value is `expected`; return the value it has then.

        A key that is not there counts as having the value b"".
        """

    def delete_key(self, key: str) -> bool:
        """Remove the key; return whether it was there."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key is there now."""

    def num_keys(self) -> int:
        """Return how many keys the whole store has, whoever set them; a queue counts while something is in it."""

    def append(self, key: str, value: bytes) -> None:
        """Add the value to the end of the key's value, b"" if there is none. Raises UsageError if it gets too long."""

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        """Return the values of all keys at one moment, waiting until each has one. Raises TimeoutError."""

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        """Set all of them at one moment."""

    def delete_prefix(self, prefix: str) -> int:
        """Remove all keys, queues too, that begin so, at one moment; return how many there were.

        A prefix has the limits of a key.
        """

    # Queues have names of their own: the queue "a" and the key "a" have nothing to do with each other.

    def queue_push(self, queue: str, value: bytes) -> None:
        """Put the value at the end of the queue."""

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        """Take the first value out of the queue, waiting until there is one.

        Of those who wait, who waits longest goes first if one process serves the store (memory, TCP); elsewhere the
        quickest. Raises TimeoutError; a timeout of 0 only looks.
        """

    def queue_len(self, queue: str) -> int:
        """Return how many values are in the queue."""

    # Keys that tell

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        """Return those keys whose values are not the known ones, with their values, as soon as there is one.

        None stands for a key that is not there. Returns an empty dict if nothing has changed until the timeout.
        """

    def hold(self, key: str, value: bytes) -> None:
        """Set the key for as long as this client lives: it goes when the client closes, dies or loses its connection.

        Whoever held last holds; `delete_key` ends it, other changes of the value do not. A client that reconnects holds
        it again. How soon a death shows depends on the store: at once, or after a lease.
        """

    def fork(self) -> Store:
        """Return another client of the same store, for a thread of its own; it is closed by itself."""

    def close(self) -> None:
        """Let go of the store; the keys stay, but for those held. A second call does nothing.

        A call in which another thread waits raises UsageError.
        """


def check_key(key: str) -> bytes:
    """Return the key as bytes. Raises UsageError if it is no text, empty or too long."""
    try:
        encoded = key.encode()
    except (AttributeError, UnicodeEncodeError):
        raise UsageError(f"a store's key is text that can be written as UTF-8, not {key!r}") from None
    if not 0 < len(encoded) <= KEY_LIMIT_BYTES:
        raise UsageError(f"a store's key has 1 to {KEY_LIMIT_BYTES} bytes; {key[:40]!r} has {len(encoded)}")
    return encoded


def several(keys: Iterable[str]) -> list[str]:
    """Return the keys. Raises UsageError for a single one, whose letters would be taken for keys."""
    if isinstance(keys, str):
        raise UsageError(f"keys are a list: write [{keys[:40]!r}], not {keys[:40]!r}")
    return list(keys)


def check_value(key: str, value: bytes) -> bytes:
    """Return the value as bytes of its own. Raises UsageError if it is nothing like bytes, or too long."""
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
    """Return the error for a key that did not come."""
    message = f"waited {timeout_ns / 1e9:g} s for {key!r} in the store at {address}"
    return TimeoutError(message, operation="store", waited_ns=timeout_ns)
