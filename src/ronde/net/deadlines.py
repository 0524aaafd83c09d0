"""Blocking reads and writes on a socket that end at a deadline, a value of `time.monotonic_ns()` (None: never)."""

from __future__ import annotations

import socket
import time

__all__ = ["receive_some", "send_all", "set_deadline"]


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


def receive_some(sock: socket.socket, most: int, deadline_ns: int | None) -> bytes:
    """Return between 1 and `most` bytes, as soon as any arrive.

    Raises builtins.TimeoutError at the deadline, ConnectionError at the end of the stream.
    """
    set_deadline(sock, deadline_ns)
    data = sock.recv(most)
    if not data:
        raise ConnectionResetError("the connection was closed by the other end")
    return data
