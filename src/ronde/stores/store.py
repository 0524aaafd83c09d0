"""The interface of a store: a small shared map from names to bytes, where processes meet before they are connected.

Waiting needs no polling by the caller: `get`, `wait`, `queue_pop` and `watch` return as soon as they can, and `hold`
makes the death of a client visible to `watch`.

The suite tests/conformance/test_stores.py defines what every store must do.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import BinaryIO, Protocol

from ronde.errors import TimeoutError, UsageError

__all__ = [
    "AMOUNT_DIGITS",
    "AMOUNT_LIMIT",
    "KEY_LIMIT_BYTES",
    "VALUE_LIMIT_BYTES",
    "Store",
    "check_amount",
    "check_key",
    "check_value",
    "missing_of",
    "key_list",
    "missing_keys_error",
    "delete_large",
    "get_large",
    "put_large",
]

KEY_LIMIT_BYTES = 1024
VALUE_LIMIT_BYTES = 1 << 20
AMOUNT_DIGITS = 40
AMOUNT_LIMIT = 10**AMOUNT_DIGITS
SHOWN_KEYS = 3
PIECES_AT_ONCE = 16  # of 1 MiB: an answer of a store has a limit, too


class Store(Protocol):
    """A map from keys (text of 1 to 1,024 bytes) to values (at most 1 MiB). Every method is atomic.

        store.set("color", b"red")
        store.get("color", timeout_ns=10**9)  # b"red"

    One call at a time: a second thread waits for the first one's answer.
    """

    @property
    def address(self) -> str:
        """The address of the store, for messages."""

    def set(self, key: str, value: bytes) -> None:
        """Set the key to the value, whether or not it had one.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.
            value: At most 1 MiB, as bytes or another bytes-like object.

        Raises:
            UsageError: The key or the value is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def get(self, key: str, timeout_ns: int) -> bytes:
        """Return the key's value, waiting until it has one.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.
            timeout_ns: How long the call waits, in nanoseconds; 0: not at all.

        Raises:
            TimeoutError: The key had no value within `timeout_ns`.
            UsageError: The key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        """Return once each key has existed, not necessarily all at one moment.

        Args:
            keys: A list of keys.
            timeout_ns: How long the call waits, in nanoseconds; 0: not at all.

        Raises:
            TimeoutError: A key did not exist within `timeout_ns`; the error names those that are missing.
            UsageError: `keys` is a text, a key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def add(self, key: str, amount: int) -> int:
        """Add to the number under the key (0 if there is none), kept as decimal text; return the sum.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.
            amount: A whole number of at most 40 digits, also a negative one or 0.

        Raises:
            UsageError: The value is not a number, key or amount are outside their limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key to `desired` if its value is `expected`; return the value that it then has.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.
            expected: The value that the key must have. An absent key counts as having the value b"".
            desired: The new value, at most 1 MiB.

        Raises:
            UsageError: The key or a value is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def delete_key(self, key: str) -> bool:
        """Delete the key; return whether it existed.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.

        Raises:
            UsageError: The key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key exists now.

        Args:
            keys: A sequence of keys.

        Raises:
            UsageError: `keys` is a text, a key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def num_keys(self) -> int:
        """Return the number of keys in the whole store, of all clients; a queue counts while it is not empty.

        Raises:
            UsageError: This client is closed.
            PeerLostError: The store is gone.
        """

    def append(self, key: str, value: bytes) -> None:
        """Append to the key's value, b"" if it has none.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.
            value: The bytes to append.

        Raises:
            UsageError: The whole value would exceed 1 MiB, the key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        """Return the values of all keys at one moment, in the order of `keys`, waiting until each has one.

        Args:
            keys: A sequence of keys.
            timeout_ns: How long the call waits, in nanoseconds; 0: not at all.

        Raises:
            TimeoutError: There was no such moment within `timeout_ns`; the error names those that are missing.
            UsageError: `keys` is a text, a key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        """Set all keys at one moment.

        Args:
            values: The new values by key.

        Raises:
            UsageError: The key or the value is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys and queues with this prefix at one moment; return how many there were.

        Args:
            prefix: The first characters of their names, with the limits of a key.

        Raises:
            UsageError: The prefix is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    # Queues have separate names: the queue "a" is independent of the key "a".

    def queue_push(self, queue: str, value: bytes) -> None:
        """Append the value to the queue.

        Args:
            queue: The name of the queue, with the limits of a key.
            value: At most 1 MiB, as bytes or another bytes-like object.

        Raises:
            UsageError: The name or the value is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        """Remove and return the first value of the queue, waiting until there is one.

        If one process serves the store (memory, TCP), waiting clients are served in the order of their arrival;
        elsewhere the fastest gets the value.

        Args:
            queue: The name of the queue, with the limits of a key.
            timeout_ns: How long the call waits, in nanoseconds; 0: not at all.

        Raises:
            TimeoutError: The queue had no value for this client within `timeout_ns`.
            UsageError: The name is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def queue_len(self, queue: str) -> int:
        """Return the number of values in the queue.

        Args:
            queue: The name of the queue, with the limits of a key.

        Raises:
            UsageError: The name is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    # Watched and held keys

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        """Return the keys whose values differ from the known ones, with their values, as soon as there is one.

        None stands for an absent key. Returns an empty dict if no key has changed before the timeout.

        Args:
            known: The known values by key; None for an absent key.
            timeout_ns: How long the call waits, in nanoseconds; 0: not at all.

        Raises:
            UsageError: The key is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def hold(self, key: str, value: bytes) -> None:
        """Set the key until this client closes, dies or loses its connection.

        The last client to hold a key holds it; `delete_key` ends that, other changes of the value do not. A client that
        reconnects holds its keys again. The death of a client shows at once or after a lease, depending on the store.

        Args:
            key: Text of 1 to 1,024 bytes in UTF-8.
            value: At most 1 MiB, as bytes or another bytes-like object.

        Raises:
            UsageError: The key or the value is outside its limits, or this client is closed.
            PeerLostError: The store is gone.
        """

    def fork(self) -> Store:
        """Return another client of the same store, for another thread; the caller closes it.

        Raises:
            UsageError: This client is closed.
            TimeoutError, PeerLostError: The store cannot be reached.
        """

    def close(self) -> None:
        """Close this client. Its held keys go, all others stay. A second call does nothing.

        Another thread that waits in a call of this client gets a UsageError. Raises nothing.
        """


def check_key(key: str) -> bytes:
    """Return the key as bytes.

    Args:
        key: Text of 1 to 1,024 bytes in UTF-8.

    Raises:
        UsageError: It is not text, empty or too long.
    """
    try:
        encoded = key.encode()
    except (AttributeError, UnicodeEncodeError):
        raise UsageError(f"a store's key is text that can be written as UTF-8, not {key!r}") from None
    if not 0 < len(encoded) <= KEY_LIMIT_BYTES:
        raise UsageError(f"a store's key has 1 to {KEY_LIMIT_BYTES} bytes; {key[:40]!r} has {len(encoded)}")
    return encoded


def check_amount(key: str, amount: int) -> None:
    """Check the amount of an `add`.

    Args:
        key: The key, for the message.
        amount: A whole number of at most 40 digits.

    Raises:
        UsageError: It has more digits.
    """
    if not -AMOUNT_LIMIT < amount < AMOUNT_LIMIT:
        raise UsageError(f"cannot add to {key[:40]!r}: the amount has more than {AMOUNT_DIGITS} digits")


def key_list(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list.

    Args:
        keys: Any iterable of keys but a text, whose letters would count as keys.

    Raises:
        UsageError: It is a text.
    """
    if isinstance(keys, str):
        raise UsageError(f"keys are a list: write [{keys[:40]!r}], not {keys[:40]!r}")
    return list(keys)


def check_value(key: str, value: bytes) -> bytes:
    """Return the value as bytes.

    Args:
        key: The key, for the error.
        value: At most 1 MiB, as bytes or another bytes-like object.

    Raises:
        UsageError: It is not bytes-like, or too long.
    """
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


def missing_of(keys: Sequence[str], check: Callable[[Sequence[str]], bool]) -> Iterator[str]:
    """Yield the keys that do not exist, for the error of a store that only tells whether all exist.

    Args:
        keys: A sequence of keys.
        check: Returns whether every key exists now, as `Store.check` does.

    Raises:
        UsageError, PeerLostError: as `check` does.
    """
    if check(keys):
        return
    if len(keys) == 1:
        yield keys[0]
        return
    middle = len(keys) // 2
    yield from missing_of(keys[:middle], check)
    yield from missing_of(keys[middle:], check)


def missing_keys_error(missing: str | Iterable[str], address: str, timeout_ns: int) -> TimeoutError:
    """Return the error for keys that did not appear in time, for a store to raise.

    Args:
        missing: The key, or several that are missing, of which the error names the first three.
        address: The address of the store.
        timeout_ns: How long the call has waited, in nanoseconds.

    Raises:
        UsageError, PeerLostError: as an iterator over the keys does.
    """
    first = [missing] if isinstance(missing, str) else list(islice(missing, SHOWN_KEYS + 1))
    names = ", ".join(map(repr, first[:SHOWN_KEYS])) or "several keys, which have appeared since,"
    if len(first) > SHOWN_KEYS:
        names += " and more"
    message = f"waited {timeout_ns / 1e9:g} s for {names} in the store at {address}"
    return TimeoutError(message, operation="store", waited_ns=timeout_ns)


# Values of any size, in pieces that a store takes: `key` has their number, `key/0` and so on have the pieces.


def put_large(store: Store, key: str, value: bytes | BinaryIO) -> None:
    """Write a value of any size. A client that waits for the key by `get_large` finds all of it.

    Args:
        store: A client of the store.
        key: Text of 1 to 1,000 bytes in UTF-8.
        value: The value, or a file whose rest is the value.

    Raises:
        UsageError, PeerLostError: as `Store.set` does.
    """
    file = io.BytesIO(value) if isinstance(value, bytes) else value
    count = 0
    while piece := file.read(VALUE_LIMIT_BYTES):
        store.set(_piece(key, count), piece)
        count += 1
    store.set(key, str(count).encode())


def get_large(store: Store, key: str, timeout_ns: int) -> Iterator[bytes]:
    """Return the pieces of a value that `put_large` writes, after waiting for it.

    Args:
        store: A client of the store.
        key: The key of the value.
        timeout_ns: How long to wait for the value and its pieces, in nanoseconds.

    Raises:
        TimeoutError: The value was not written in time.
        UsageError, PeerLostError: as `Store.get` does.
    """
    deadline_ns = time.monotonic_ns() + timeout_ns
    count = int(store.get(key, timeout_ns))

    def pieces() -> Iterator[bytes]:
        for first in range(0, count, PIECES_AT_ONCE):
            keys = [_piece(key, number) for number in range(first, min(first + PIECES_AT_ONCE, count))]
            yield from store.multi_get(keys, max(1, deadline_ns - time.monotonic_ns()))

    return pieces()


def delete_large(store: Store, key: str) -> None:
    """Delete a value that `put_large` has written.

    Args:
        store: A client of the store.
        key: The key of the value.

    Raises:
        UsageError, PeerLostError: as `Store.delete_key` does.
    """
    store.delete_key(key)
    store.delete_prefix(f"{key}/")


def _piece(key: str, number: int) -> str:
    return f"{key}/{number}"
