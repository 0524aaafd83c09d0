"""The listeners of a served store: one at its address, and a Unix socket as a shortcut for clients on its host.

A request through the Unix socket costs half as much as through TCP. The name of the socket follows from the job key and
the address to which the port is bound, so only the job can know it, and a client that finds it in its network namespace
reaches the same store as through the port.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, Endpoint, is_ours, listen

__all__ = ["MAX_CLIENTS", "listen_for_clients", "detect_loss", "shortcuts"]

MAX_CLIENTS = 20_000
SILENCE_S = 6  # how long a connection may be without a sign of life
WILDCARDS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def listen_for_clients(
    address: Address, key: JobKey, listener: socket.socket | None = None
) -> tuple[list[socket.socket], Address]:
    """Return the listening sockets of a store at `address`, and the address with its actual port.

    `listener`: a socket that listens there already. Raises UsageError if the address is taken or not this machine's.
    """
    listener, address = (listener, address) if listener else listen(address)
    if address.is_unix:
        return [listener], address
    bound = listener.getsockname()
    try:
        return [listener, listen(_shortcut(key, bound[0], bound[1]))[0]], address
    except UsageError:
        return [listener], address  # the name is taken: all clients use TCP


def shortcuts(endpoint: Endpoint, key: JobKey) -> Iterator[Endpoint]:
    """Return the Unix sockets to try before a TCP endpoint: of a store bound to it, or to all addresses of the host."""
    if endpoint.family not in WILDCARDS:
        return
    host, port = str(endpoint.sockaddr[0]), int(endpoint.sockaddr[1])
    bound_to = [host]
    if is_ours(endpoint):
        bound_to += {WILDCARDS[endpoint.family], "::"}
    for each in bound_to:
        yield Endpoint(socket.AF_UNIX, "\0" + _shortcut(key, each, port).path[1:])


def _shortcut(key: JobKey, host: str, port: int) -> Address:
    name = key.hmac(b"short way to the store", host.encode(), b"%d" % port)
    return Address(path=f"@ronde-store-{name.hex()[:32]}")


def detect_loss(sock: socket.socket) -> None:
    """Let a TCP connection send without delay, and break within seconds when the other end is silent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - SILENCE_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
