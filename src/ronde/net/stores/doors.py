"""The sockets at which a served store takes clients in: that of its address, and a short way for those on its host.

A store at a TCP port also listens at a Unix socket, because a request through that costs half as much. Its name follows
from the job key and from what the port is bound to, so only the job can know it, and a client that finds such a socket
in its network namespace has found the store that it would have reached through the port.
"""

from __future__ import annotations

import errno
import resource
import select
import socket
from collections.abc import Iterator

from ronde.errors import AuthenticationError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, Endpoint, is_ours, listen
from ronde.net.peers import check_user

__all__ = ["MAX_CLIENTS", "Doors", "notice_loss", "short_ways"]

MAX_CLIENTS = 20_000
OTHER_FILES = 1_000
SILENCE_S = 6  # how long a connection may get no sign of its other end
WILDCARDS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


class Doors:
    """The listening sockets of a store at `address`, open from the start; `address` has the port that it really has.

    A `listener` that waits there already is one of them. Raises UsageError if the address is taken or not ours.
    """

    def __init__(self, address: Address, key: JobKey, listener: socket.socket | None = None) -> None:
        listener, self.address = (listener, address) if listener else listen(address)
        self._listeners = {listener.fileno(): listener}
        if not address.is_unix:
            bound = listener.getsockname()
            try:
                shorter, _ = listen(_short_way(key, bound[0], bound[1]))
                self._listeners[shorter.fileno()] = shorter
            except UsageError:
                pass  # then all take the long way
        self.are_open = False

    def open(self, epoll: select.epoll) -> None:
        """Let the poll tell of newcomers."""
        if not self.are_open:
            for fd in self._listeners:
                epoll.register(fd, select.EPOLLIN)
            self.are_open = True

    def shut(self, epoll: select.epoll) -> None:
        """Leave newcomers in the queues of the sockets for now."""
        if self.are_open:
            for fd in self._listeners:
                epoll.unregister(fd)
            self.are_open = False

    def __contains__(self, fd: int) -> bool:
        return fd in self._listeners

    def accept(self, fd: int) -> socket.socket | None:
        """Return the next newcomer at this door, or None. Raises OSError if there are no file descriptors left."""
        while True:
            try:
                sock, _ = self._listeners[fd].accept()
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not raise_limit_of_files():
                    raise
                continue  # or that one connection broke before we took it
            try:
                check_user(sock)
                sock.setblocking(False)
                if sock.family != socket.AF_UNIX:
                    notice_loss(sock)
            except (OSError, AuthenticationError):  # it has broken meanwhile, or is another user's
                sock.close()
                continue
            return sock

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()


def short_ways(endpoint: Endpoint, key: JobKey) -> Iterator[Endpoint]:
    """Return Unix sockets to try before a TCP endpoint: of a store bound to it, or to all addresses of this host."""
    if endpoint.family not in WILDCARDS:
        return
    host, port = str(endpoint.sockaddr[0]), int(endpoint.sockaddr[1])
    bound_to = [host]
    if is_ours(endpoint):
        bound_to += {WILDCARDS[endpoint.family], "::"}
    for each in bound_to:
        yield Endpoint(socket.AF_UNIX, "\0" + _short_way(key, each, port).path[1:])


def _short_way(key: JobKey, host: str, port: int) -> Address:
    name = key.hmac(b"short way to the store", host.encode(), b"%d" % port)
    return Address(path=f"@ronde-store-{name.hex()[:32]}")


def notice_loss(sock: socket.socket) -> None:
    """Let a TCP connection send without delay, and break within seconds when nothing comes back from the other end."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - SILENCE_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def raise_limit_of_files() -> bool:
    """Allow this process the files for all clients, or what it may have; return whether that is more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MAX_CLIENTS + OTHER_FILES, hard)
    if soft >= wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True
