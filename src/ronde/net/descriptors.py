"""File descriptors that travel between processes of one host, over connected Unix sockets (SCM_RIGHTS)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ronde.net.deadlines import set_deadline

__all__ = ["receive_descriptors", "send_descriptors"]

PER_MESSAGE = 250  # Linux takes 253


def send_descriptors(lane: socket.socket, descriptors: Sequence[int], deadline_ns: int | None) -> None:
    """Give the other end duplicates. None at all is a message too: it says that there will be none.

    Raises builtins.TimeoutError at the deadline (of `time.monotonic_ns()`), ConnectionError if the peer is gone.
    """
    for start in range(0, max(1, len(descriptors)), PER_MESSAGE):
        set_deadline(lane, deadline_ns)
        socket.send_fds(lane, [b"d"], descriptors[start : start + PER_MESSAGE])


def receive_descriptors(lane: socket.socket, count: int, deadline_ns: int | None) -> list[int]:
    """Return `count` descriptors, closed on exec; an empty list if the sender had none to give.

    Raises as `send_descriptors`, and OSError if this process has no room for them.
    """
    received: list[int] = []
    try:
        while len(received) < count:
            set_deadline(lane, deadline_ns)
            data, fds, flags, _ = socket.recv_fds(lane, 1, min(PER_MESSAGE, count - len(received)))
            received += fds
            for fd in fds:
                os.set_inheritable(fd, False)
            if not data:
                raise ConnectionResetError("the connection was closed by the other end")
            if flags & socket.MSG_CTRUNC:
                raise OSError("this process has run out of file descriptors (see `ulimit -n`)")
            if not fds:
                break
    except BaseException:
        for fd in received:
            os.close(fd)
        raise
    return received
