"""Requests and answers between a store's client and its server, each in one frame.

    request = length of the rest (4 bytes), operation (1), number (8), timeout in ns (8), length of the key (2), key,
              argument (the rest)
    answer  = length of the rest (4 bytes), status (1), value (the rest)

A client numbers the requests that must be carried out only once, from 1; other requests have number 0. It repeats a
request without an answer under the same number, and the server repeats its first answer.

The argument is the value for SET, APPEND, PUSH and HOLD, decimal text for ADD, and for COMPARE_SET the length of the
expected value (4 bytes), the expected and the desired value. Several keys with values are lists as packed below, and
several keys without them are each its length (2 bytes) and the key; then the key of the request is empty.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

from ronde.errors import ProtocolError
from ronde.stores.store import KEY_LIMIT_BYTES, VALUE_LIMIT_BYTES

__all__ = [
    "ANSWER",
    "FRAME_LIMIT_BYTES",
    "HEAD",
    "LENGTH",
    "OPERATIONS",
    "StoreOperation",
    "Request",
    "Status",
    "answer",
    "digest_of",
    "fingerprint",
    "is_named",
    "known_from",
    "keys_from",
    "pack_known",
    "pack_pairs",
    "pack_values",
    "pairs_from",
    "request",
    "split_expected",
    "values_from",
]

FRAME_LIMIT_BYTES = 64 << 20
DIGEST_BYTES = 32
HEAD = struct.Struct("!IBQQH")
ANSWER = struct.Struct("!IB")
LENGTH = struct.Struct("!I")
Request = tuple[int, int, int, bytes, bytes]  # operation, number, timeout in ns, key, argument
_KEY = struct.Struct("!H")
_PAIR = struct.Struct("!HBI")


class StoreOperation:
    """The operations of requests. WAIT answers like MULTI_GET, but without the values; BYE has no answer."""

    # Not an enumeration: before Python 3.12 the access to a member takes longer than packing a request's head.

    SET = 1
    GET = 2
    WAIT = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6
    CHECK = 7
    NUM_KEYS = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    DELETE_PREFIX = 12
    PUSH = 13
    POP = 14
    QUEUE_LEN = 15
    WATCH = 16
    HOLD = 17
    BYE = 18


OPERATIONS = range(StoreOperation.SET, StoreOperation.BYE + 1)


class Status:
    """The status of an answer.

    ABSENT: a key or value did not exist, or did not appear in time. REFUSED: the request is invalid. FAILED: the store
    cannot carry it out now. The last two carry a message for the caller.
    """

    OK = 0
    ABSENT = 1
    REFUSED = 2
    FAILED = 3


# A key in a WATCH or its answer has one of: no value, a value, or the digest of a long value.
_ABSENT, _VALUE, _DIGEST = 0, 1, 2


def request(
    operation: int, key: bytes = b"", argument: bytes = b"", timeout_ns: int = 0, number: int = 0
) -> bytes:
    """Return the frame of a request."""
    size = len(key)
    length = HEAD.size - LENGTH.size + size + len(argument)
    return HEAD.pack(length, operation, number, timeout_ns, size) + key + argument


def answer(status: int, value: bytes = b"") -> bytes:
    """Return the frame of an answer."""
    return ANSWER.pack(1 + len(value), status) + value


def is_named(operation: int) -> bool:
    """Return whether requests of this operation have a key."""
    return operation not in _NAMELESS


_NAMELESS = frozenset(
    {
        StoreOperation.WAIT,
        StoreOperation.CHECK,
        StoreOperation.NUM_KEYS,
        StoreOperation.MULTI_GET,
        StoreOperation.MULTI_SET,
        StoreOperation.WATCH,
        StoreOperation.BYE,
    }
)


# Arguments


def split_expected(argument: bytes) -> tuple[bytes, bytes]:
    """Return the two values of a COMPARE_SET. Raises ProtocolError."""
    if len(argument) < LENGTH.size:
        raise ProtocolError("a request to the store is too short")
    end = LENGTH.size + LENGTH.unpack_from(argument)[0]
    if end > len(argument):
        raise ProtocolError("the expected value in a request to the store is incomplete")
    return argument[LENGTH.size : end], argument[end:]


def keys_from(data: bytes) -> list[bytes]:
    """Return the keys of a list. Raises ProtocolError."""
    keys = []
    place = 0
    while place < len(data):
        if len(data) - place < _KEY.size:
            raise ProtocolError("a list of keys is incomplete")
        (length,) = _KEY.unpack_from(data, place)
        place += _KEY.size + length
        if place > len(data) or not 0 < length <= KEY_LIMIT_BYTES:
            raise ProtocolError("a request to the store has a key of the wrong length")
        keys.append(data[place - length : place])
    return keys


def pack_values(values: Iterable[bytes]) -> bytes:
    return b"".join([LENGTH.pack(len(value)) + value for value in values])


def values_from(data: bytes) -> list[bytes]:
    """Return the values of `pack_values`. Raises ProtocolError."""
    values = []
    place = 0
    while place < len(data):
        if len(data) - place < LENGTH.size:
            raise ProtocolError("a list of values is incomplete")
        (length,) = LENGTH.unpack_from(data, place)
        place += LENGTH.size + length
        if place > len(data):
            raise ProtocolError("a list of values is incomplete")
        values.append(data[place - length : place])
    return values


def pack_pairs(pairs: Mapping[bytes, bytes | None]) -> bytes:
    """Pack keys with values; None stands for an absent key."""
    return b"".join(
        [
            _PAIR.pack(len(key), _ABSENT if value is None else _VALUE, len(value or b""))
            + key
            + (value or b"")
            for key, value in pairs.items()
        ]
    )


def pack_known(known: Mapping[bytes, bytes | None]) -> bytes:
    """Pack the keys and known values of a WATCH, long values as digests."""
    pieces = []
    for key, value in known.items():
        kind = _ABSENT if value is None else _VALUE
        if value is not None and len(value) > DIGEST_BYTES:
            kind, value = _DIGEST, digest_of(value)
        pieces.append(_PAIR.pack(len(key), kind, len(value or b"")) + key + (value or b""))
    return b"".join(pieces)


def pairs_from(data: bytes) -> dict[bytes, bytes | None]:
    """Return the pairs of `pack_pairs`. Raises ProtocolError."""
    return {key: None if kind == _ABSENT else value for key, kind, value in _triples(data)}


def known_from(data: bytes) -> dict[bytes, bytes | None]:
    """Return the fingerprints of the values in a WATCH, None for an absent key. Raises ProtocolError."""
    found: dict[bytes, bytes | None] = {}
    for key, kind, value in _triples(data):
        found[key] = None if kind == _ABSENT else bytes([kind]) + value
    return found


def fingerprint(value: bytes) -> bytes:
    """Return the fingerprint of a value, as in `known_from`."""
    if len(value) > DIGEST_BYTES:
        return bytes([_DIGEST]) + digest_of(value)
    return bytes([_VALUE]) + value


def digest_of(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=DIGEST_BYTES).digest()


def _triples(data: bytes) -> Iterable[tuple[bytes, int, bytes]]:
    place = 0
    while place < len(data):
        if len(data) - place < _PAIR.size:
            raise ProtocolError("a list of values is incomplete")
        key_length, kind, length = _PAIR.unpack_from(data, place)
        place += _PAIR.size
        key = _key(data[place : place + key_length], key_length)
        place += key_length + length
        if place > len(data) or length > VALUE_LIMIT_BYTES or kind > _DIGEST:
            raise ProtocolError("a list of values is incomplete or malformed")
        yield key, kind, data[place - length : place]


def _key(key: bytes, length: int) -> bytes:
    if len(key) != length or not 0 < length <= KEY_LIMIT_BYTES:
        raise ProtocolError("a request to the store has a key of the wrong length")
    return key
