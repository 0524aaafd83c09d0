"""Accepts connections at listening sockets, and tells failures of a connection from failures of the listener.

A connection that broke in the queue is skipped, and so is another user's at a Unix socket.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from ronde.net.own_descriptors import OwnSocket
from ronde.net.peers import process_and_user

__all__ = ["Caller", "accept_caller", "is_shortage", "source_of"]

MOST_BROKEN = 16  # in a row, so that the other sockets of a loop get their turn
ANOTHER_USER = "this Unix socket accepts only processes of the same user"
# Errors of accept(2) that concern the connection, not the listener.
_BROKEN = {
    errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET, errno.ETIMEDOUT,
}  # fmt: skip
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_MAPPED_IPV4 = bytes(10) + b"\xff\xff"
_NETWORK_BYTES = 8
_LINK_LOCAL, _LINK_LOCAL_BITS = 0xFE80 >> 6, 10


class Caller(NamedTuple):
    """A new, non-blocking connection. `source`: shared by all that one peer can easily make; `name`: for messages."""

    sock: socket.socket
    source: str
    name: str


def accept_caller(listener: socket.socket, turn_away: Callable[[str, str], None]) -> Caller | None:
    """Return the next connection in the queue of a non-blocking listener, or None if there is no intact one.

    `turn_away` gets the reason and the name for each connection of another user. Raises OSError if the listener cannot
    accept: see `is_shortage`.
    """
    for _ in range(MOST_BROKEN):
        try:
            accepted, address = listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _BROKEN:
                continue
            raise
        sock = OwnSocket(accepted.family, accepted.type, accepted.proto, accepted.detach())
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            host, port = address[:2]
            return Caller(sock, source_of(host), f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        process, user = process_and_user(sock)
        if user == os.geteuid():
            return Caller(sock, "", f"process {process}")
        sock.close()
        turn_away(ANOTHER_USER, f"process {process} of user {user}")
    return None


def is_shortage(error: OSError) -> bool:
    """Return whether `accept` failed because descriptors or memory were short, which may pass."""
    return error.errno in _SHORTAGES


def source_of(host: str) -> str:
    """Return what counts as one peer: an IPv4 address, or an IPv6 network, in which a host can have any address.

    Link-local addresses all have the same network, on every link, so each counts alone, with its interface.
    """
    if ":" not in host:
        return host
    text, _, interface = host.partition("%")
    address = socket.inet_pton(socket.AF_INET6, text)
    if int.from_bytes(address, "big") >> (128 - _LINK_LOCAL_BITS) == _LINK_LOCAL:
        return f"{address.hex()}%{interface}"
    if address.startswith(_MAPPED_IPV4):
        return socket.inet_ntop(socket.AF_INET, address[len(_MAPPED_IPV4) :])
    return address[:_NETWORK_BYTES].hex()
