"""Requests and answers between a store's client and its server, each in one frame.

    request = operation (1 byte), timeout in ns (8), length of the key (2), key, argument (the rest)
    answer  = status (1 byte), value (the rest)

The argument is the value for SET, decimal text for ADD, and for COMPARE_SET the length of the expected value (4 bytes),
the expected and the desired value.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from ronde.errors import ProtocolError
from ronde.net.stores.base import KEY_LIMIT_BYTES, VALUE_LIMIT_BYTES

__all__ = ["FRAME_LIMIT_BYTES", "MAX_TIMEOUT_NS", "Operation", "Request", "Status", "answer", "parse_answer"]

FRAME_LIMIT_BYTES = 2 * VALUE_LIMIT_BYTES + KEY_LIMIT_BYTES + 64
MAX_TIMEOUT_NS = 2**63 - 1
_HEAD = struct.Struct("!BQH")
_LENGTH = struct.Struct("!I")


class Operation(IntEnum):
    """What a client asks for. WAIT answers like GET, but without the value."""

    SET = 1
    GET = 2
    WAIT = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6


class Status(IntEnum):
    """How it went: ABSENT is a key that did not come in time or was not there to delete; REFUSED has a sentence."""

    OK = 0
    ABSENT = 1
    REFUSED = 2


@dataclass(frozen=True)
class Request:
    """One request; `timeout_ns` counts for GET and WAIT."""

    operation: Operation
    key: bytes
    argument: bytes = b""
    timeout_ns: int = 0

    @classmethod
    def compare_set(cls, key: bytes, expected: bytes, desired: bytes) -> Request:
        return cls(Operation.COMPARE_SET, key, _LENGTH.pack(len(expected)) + expected + desired)

    def expected_and_desired(self) -> tuple[bytes, bytes]:
        """Return the two values of a COMPARE_SET. Raises ProtocolError."""
        if len(self.argument) < _LENGTH.size:
            raise ProtocolError("a request to the store is too short")
        end = _LENGTH.size + _LENGTH.unpack_from(self.argument)[0]
        return self.argument[_LENGTH.size : end], self.argument[end:]

    def encode(self) -> bytes:
        timeout_ns = min(max(self.timeout_ns, 0), MAX_TIMEOUT_NS)
        return _HEAD.pack(self.operation, timeout_ns, len(self.key)) + self.key + self.argument

    @classmethod
    def decode(cls, payload: bytes) -> Request:
        """Return the request in a frame. Raises ProtocolError."""
        try:
            operation, timeout_ns, length = _HEAD.unpack_from(payload)
            key = payload[_HEAD.size : _HEAD.size + length]
            request = cls(Operation(operation), key, payload[_HEAD.size + length :], timeout_ns)
        except (struct.error, ValueError):
            raise ProtocolError("a request to the store makes no sense") from None
        if len(key) != length or not 0 < length <= KEY_LIMIT_BYTES:
            raise ProtocolError("a request to the store has a key of the wrong length")
        return request


def answer(status: Status, value: bytes = b"") -> bytes:
    """Return the payload of an answer."""
    return bytes([status]) + value


def parse_answer(payload: bytes) -> tuple[Status, bytes]:
    """Return the status and value of an answer. Raises ProtocolError."""
    try:
        return Status(payload[0]), payload[1:]
    except (IndexError, ValueError):
        raise ProtocolError("an answer of the store makes no sense") from None
