"""Frames: a length of 4 bytes (big-endian), then that many bytes of payload; and reading and writing with deadlines.

A deadline is a value of `time.monotonic_ns()`. Nothing is allocated for a length above the limit.
"""

from __future__ import annotations

import socket
import struct
import time

from ronde.errors import ProtocolError

__all__ = [
    "FrameReader",
    "frame",
    "receive_exactly",
    "receive_frame",
    "receive_some",
    "send_all",
    "set_deadline",
]

_LENGTH = struct.Struct("!I")


def frame(payload: bytes) -> bytes:
    """Return the payload as a frame."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes, fed in any pieces, into payloads of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes. Raises ProtocolError at a frame above the limit."""
        self._buffer += data
        payloads = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            _check_length(length, self._limit_bytes)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads


def _check_length(length: int, limit_bytes: int) -> None:
    if length > limit_bytes:
        raise ProtocolError(f"a frame of {length} bytes came where at most {limit_bytes} are allowed")


def set_deadline(sock: socket.socket, deadline_ns: int | None) -> None:
    """Let the next blocking call on the socket end at the deadline. Raises builtins.TimeoutError if it has passed."""
    if deadline_ns is None:
        sock.settimeout(None)
        return
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(left_ns / 1e9)


def send_all(sock: socket.socket, data: bytes, deadline_ns: int | None) -> None:
    """Write all bytes. Raises builtins.TimeoutError at the deadline, ConnectionError if the peer is gone."""
    set_deadline(sock, deadline_ns)
    sock.sendall(data)


def receive_exactly(sock: socket.socket, length: int, deadline_ns: int | None) -> bytes:
    """Read `length` bytes. Raises builtins.TimeoutError at the deadline, ConnectionError at the end of the stream."""
    data = bytearray()
    while len(data) < length:
        data += receive_some(sock, length - len(data), deadline_ns)
    return bytes(data)


def receive_some(sock: socket.socket, most: int, deadline_ns: int | None) -> bytes:
    """Read what has come, at least one byte and at most `most`. Raises as `receive_exactly`."""
    set_deadline(sock, deadline_ns)
    data = sock.recv(most)
    if not data:
        raise ConnectionResetError("the connection was closed by the other end")
    return data


def receive_frame(sock: socket.socket, limit_bytes: int, deadline_ns: int | None) -> bytes:
    """Read one frame's payload. Raises as `receive_exactly`, and ProtocolError at a frame above the limit."""
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline_ns))
    _check_length(length, limit_bytes)
    return receive_exactly(sock, length, deadline_ns)
