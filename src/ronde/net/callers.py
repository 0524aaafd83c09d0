"""Accepts connections at listening sockets: who calls, and which failures of `accept` concern the listener.

A connection that broke in the queue, or another user's at a Unix socket, costs nobody anything: the next one counts.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from ronde.net.peers import process_and_user

__all__ = ["Caller", "accept_caller", "is_shortage"]

MOST_BROKEN = 16  # in a row, so that the other sockets of a loop get their turn
ANOTHER_USER = "only processes of our own user are let in at this Unix socket"
# What accept(2) says of the connection, and not of the listener.
_BROKEN = {
    errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET, errno.ETIMEDOUT,
}  # fmt: skip
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_MAPPED_IPV4 = bytes(10) + b"\xff\xff"
_NETWORK_BYTES = 8


class Caller(NamedTuple):
    """A new connection, non-blocking. `source` is shared by all that one peer can easily make; `name` is for people."""

    sock: socket.socket
    source: str
    name: str


def accept_caller(listener: socket.socket, turn_away: Callable[[str, str], None]) -> Caller | None:
    """Return the next caller in the queue of a non-blocking listener, or None if there is none, or only broken ones.

    `turn_away` gets the reason and the name of each caller that is another user's. Raises OSError if the listener
    cannot accept: see `is_shortage`.
    """
    for _ in range(MOST_BROKEN):
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _BROKEN:
                continue
            raise
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            host, port = address[:2]
            return Caller(sock, _source(host), f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        process, user = process_and_user(sock)
        if user == os.geteuid():
            return Caller(sock, "", f"process {process}")
        sock.close()
        turn_away(ANOTHER_USER, f"process {process} of user {user}")
    return None


def is_shortage(error: OSError) -> bool:
    """Return whether `accept` failed for want of descriptors or memory, which may pass."""
    return error.errno in _SHORTAGES


def _source(host: str) -> str:
    """Return the host's address; of IPv6 the network, for a host can have any address in it."""
    if ":" not in host:
        return host
    address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if address.startswith(_MAPPED_IPV4):
        return socket.inet_ntop(socket.AF_INET, address[len(_MAPPED_IPV4) :])
    return address[:_NETWORK_BYTES].hex()
