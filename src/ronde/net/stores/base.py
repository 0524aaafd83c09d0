"""What a store is: a small map from names to bytes that all ranks see, where they meet before they are connected.

One suite, tests/conformance/test_stores.py, says what every store must do.
"""

from __future__ import annotations

from typing import Protocol

from ronde.errors import TimeoutError, UsageError

__all__ = ["KEY_LIMIT_BYTES", "VALUE_LIMIT_BYTES", "Store", "check_key", "check_value", "waited_in_vain"]

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

    def close(self) -> None:
        """Let go of the store; the keys stay. A second call does nothing."""


def check_key(key: str) -> bytes:
    """Return the key as bytes. Raises UsageError if it is empty or too long."""
    encoded = key.encode()
    if not 0 < len(encoded) <= KEY_LIMIT_BYTES:
        raise UsageError(f"a store's key has 1 to {KEY_LIMIT_BYTES} bytes; {key[:40]!r} has {len(encoded)}")
    return encoded


def check_value(key: str, value: bytes) -> bytes:
    """Return the value. Raises UsageError if it is too long."""
    if len(value) > VALUE_LIMIT_BYTES:
        raise UsageError(
            f"a store's value has at most {VALUE_LIMIT_BYTES} bytes; that of {key!r} has {len(value)}"
        )
    return value


def waited_in_vain(key: str, address: str, timeout_ns: int) -> TimeoutError:
    """Return the error for a key that did not come."""
    message = f"waited {timeout_ns / 1e9:g} s for {key!r} in the store at {address}"
    return TimeoutError(message, operation="store", waited_ns=timeout_ns)
