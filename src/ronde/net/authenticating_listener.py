"""Accepts connections at listening sockets, and returns those whose other end has proved that it knows the job key.

The rules:
  1. Until then the other end is a stranger: nothing but its fixed-size handshake is read, for ten seconds at most.
  2. Each listener has a separate limit of strangers. Further ones wait in its queue until a stranger is done, or until
     `net/admission` decides that one must leave. That also limits the log lines, and says when to try a failing
     listener again.
  3. A turn of the loop accepts only a few connections, so that a crowd does not delay authenticated peers.
  4. A connection that broke in the queue is skipped, and so is another user's at a Unix socket. Any other error of
     accept(2) is a failure of the listener.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ronde.errors import ProtocolError
from ronde.net.admission import AcceptFailures, Refusals, Strangers
from ronde.net.authentication import Handshake, is_probe
from ronde.net.descriptors import OwnSocket, raise_descriptor_limit
from ronde.net.unix_peers import process_and_user

__all__ = ["HANDSHAKE_NS", "MAX_STRANGERS", "AuthenticatedConnection", "Authenticator", "source_of"]

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
MAX_STRANGERS = 512  # of each listener
HANDSHAKE_NS = 10 * 10**9
MOST_IN_A_TURN = 16
CROWD = "others waited, and it had not proved that it knows the job key"
TOO_SLOW = f"it did not prove within {HANDSHAKE_NS // 10**9} s that it knows the job key"

_log = logging.getLogger(__name__)


class AuthenticatedConnection(NamedTuple):
    """A connection whose other end has proved that it knows the key.

    Nothing beyond the handshake has been read, and the socket is registered with the poll.
    """

    sock: socket.socket
    handshake: Handshake


class _Listener:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.strangers: Strangers[_Stranger] = Strangers(MAX_STRANGERS)
        self.failures = AcceptFailures()
        self.is_open = False
        self.reopen_ns: int | None = None


class _Stranger:
    __slots__ = ("fd", "handshake", "inbox", "listener", "name", "since_ns", "sock")

    def __init__(self, caller: _Caller, listener: _Listener, handshake: Handshake, since_ns: int) -> None:
        self.sock = caller.sock
        self.fd = caller.sock.fileno()
        self.name = caller.name
        self.listener = listener
        self.handshake = handshake
        self.inbox = b""
        self.since_ns = since_ns


class Authenticator:
    """Authenticates the peers of one service, which log lines call `owner`. The caller owns listeners and poll.

    `greet` begins the handshake on a new connection. `report` gets the OSError of a listener that cannot accept, once
    until it works again; `handle_ready` passes on the exception that it raises. `give_up` gets the error of the last
    listener, after that is closed for good.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        owner: str,
        greet: Callable[[socket.socket], Handshake],
        report: Callable[[OSError], None],
        epoll: select.epoll,
        give_up: Callable[[OSError], object] = lambda _: None,
    ) -> None:
        self._owner = owner
        self._greet = greet
        self._report = report
        self._give_up = give_up
        self._epoll = epoll
        self._listeners = {each.fd: each for each in map(_Listener, listeners)}
        self._strangers: dict[int, _Stranger] = {}  # the oldest first
        self._is_full = False
        self.refusals = Refusals()
        self.resume_accepting()

    def __contains__(self, fd: int) -> bool:
        return fd in self._strangers or fd in self._listeners

    def handle_ready(self, fd: int) -> AuthenticatedConnection | None:
        """Serve a ready descriptor of this object; return the connection that is now authenticated, if one is."""
        stranger = self._strangers.get(fd)
        if stranger is not None:
            return self._advance_handshake(stranger)
        listener = self._listeners[fd]
        if listener.is_open:
            self._accept_callers(listener)
        return None

    def pause_accepting(self) -> None:
        """Leave new connections in the queues until `resume_accepting`."""
        self._is_full = True
        for listener in self._listeners.values():
            self._pause_listener(listener, None)

    def resume_accepting(self) -> None:
        """Accept connections; call this, too, when descriptors may have become free."""
        self._is_full = False
        for listener in self._listeners.values():
            self._open_listener(listener)

    @property
    def wake_ns(self) -> int | None:
        """When to call `tick`, in the time of `time.monotonic_ns()`; None: not before the next event."""
        times = [each.reopen_ns for each in self._listeners.values() if each.reopen_ns is not None]
        if self._strangers:
            times.append(next(iter(self._strangers.values())).since_ns + HANDSHAKE_NS)
        return min(times) if times else None

    def tick(self, now_ns: int) -> None:
        """Close strangers whose time is over, and reopen listeners that are due."""
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if oldest.since_ns + HANDSHAKE_NS > now_ns:
                break
            self._refuse_stranger(oldest, TOO_SLOW)
        for listener in self._listeners.values():
            if listener.reopen_ns is not None and listener.reopen_ns <= now_ns:
                self._open_listener(listener)

    def close(self) -> None:
        """Close the connections of all strangers, and log what was not logged yet."""
        self._log_lines(self.refusals.final_lines())
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close the strangers' sockets only, as a forked child must."""
        for stranger in self._strangers.values():
            stranger.sock.close()

    # Listeners

    def _open_listener(self, listener: _Listener) -> None:
        listener.reopen_ns = None
        if not listener.is_open and not self._is_full:
            self._epoll.register(listener.fd, select.EPOLLIN)
            listener.is_open = True

    def _pause_listener(self, listener: _Listener, until_ns: int | None) -> None:
        listener.reopen_ns = until_ns
        if listener.is_open:
            self._epoll.unregister(listener.fd)
            listener.is_open = False

    def _accept_callers(self, listener: _Listener) -> None:
        for _ in range(MOST_IN_A_TURN):
            now_ns = time.monotonic_ns()
            room = listener.strangers.find_room(now_ns)
            if room.wait_until_ns:
                self._pause_listener(listener, room.wait_until_ns)
                return
            try:
                caller = _accept_caller(listener.sock, self._note_refusal)
            except OSError as error:
                self._handle_accept_failure(listener, error, now_ns)
                return
            listener.failures.note_success()
            if caller is None:
                return
            if room.leaver is not None:
                self._refuse_stranger(room.leaver, CROWD)
            self._begin_handshake(listener, caller, now_ns)

    def _handle_accept_failure(self, listener: _Listener, error: OSError, now_ns: int) -> None:
        """Handle a failing listener: close a stranger if that helps, else pause, or give up for good."""
        if _is_shortage(error) and raise_descriptor_limit():
            return
        crowded = max(self._listeners.values(), key=lambda each: len(each.strangers))
        if _is_shortage(error) and crowded.strangers:
            room = crowded.strangers.find_room(now_ns, is_short=True)
            if room.leaver is not None:
                self._refuse_stranger(room.leaver, CROWD)
            else:
                self._pause_listener(listener, room.wait_until_ns)
            return
        verdict = listener.failures.note_failure(_is_shortage(error), now_ns)
        if verdict.is_new:
            self._report(error)
        self._pause_listener(listener, now_ns + verdict.pause_ns)
        if verdict.is_final:
            _log.error("%s accepts no more connections: %s", self._owner, error.strerror)
            del self._listeners[listener.fd]
            listener.sock.close()
            if not self._listeners:
                self._give_up(error)

    def _begin_handshake(self, listener: _Listener, caller: _Caller, now_ns: int) -> None:
        try:
            handshake = self._greet(caller.sock)
        except OSError:  # the connection has broken meanwhile
            caller.sock.close()
            return
        stranger = _Stranger(caller, listener, handshake, now_ns)
        self._strangers[stranger.fd] = stranger
        listener.strangers.add_stranger(stranger, caller.source, now_ns)
        self._epoll.register(stranger.fd, select.EPOLLIN)
        self._advance_handshake(stranger)  # a peer that has waited in the queue has sent its hello by now

    # Strangers

    def _advance_handshake(self, stranger: _Stranger) -> AuthenticatedConnection | None:
        """Continue the handshake; return the connection if it is complete."""
        handshake = stranger.handshake
        try:
            data = stranger.sock.recv(handshake.wanted - len(stranger.inbox))
            if not data:
                raise ConnectionResetError("hung up")
            stranger.inbox += data
            if is_probe(stranger.inbox):  # of a client that this service has let wait
                raise ConnectionResetError("asks whether a TCPStore is here")
            if len(stranger.inbox) < handshake.wanted:
                handshake.check_beginning(stranger.inbox)
                return None
            reply = handshake.advance(stranger.inbox)
            stranger.inbox = b""
            if reply and stranger.sock.send(reply) < len(reply):
                raise ConnectionResetError("the reply does not fit into the buffer of a new connection")
        except BlockingIOError:
            return None
        except ProtocolError as error:
            self._refuse_stranger(stranger, str(error))
            return None
        except OSError:  # for example a probe, which only connects
            self._remove_stranger(stranger).close()
            return None
        if handshake.wanted:
            stranger.listener.strangers.note_hello(stranger, time.monotonic_ns())
            return None
        return AuthenticatedConnection(self._remove_stranger(stranger), handshake)

    def _refuse_stranger(self, stranger: _Stranger, reason: str) -> None:
        self._remove_stranger(stranger).close()  # this also removes it from the poll
        self._note_refusal(reason, stranger.name)

    def _remove_stranger(self, stranger: _Stranger) -> socket.socket:
        del self._strangers[stranger.fd]
        listener = stranger.listener
        listener.strangers.remove_stranger(stranger)
        if not listener.is_open and listener.fd in self._listeners:
            self._open_listener(listener)
        return stranger.sock

    def _note_refusal(self, reason: str, name: str) -> None:
        self._log_lines(self.refusals.note_refusal(reason, name, time.monotonic_ns()))

    def _log_lines(self, lines: list[str]) -> None:
        for line in lines:
            _log.warning("%s %s", self._owner, line)


# One connection


class _Caller(NamedTuple):
    """A new, non-blocking connection. `source`: shared by all that one peer can easily make; `name`: for messages."""

    sock: socket.socket
    source: str
    name: str


def _accept_caller(listener: socket.socket, turn_away: Callable[[str, str], None]) -> _Caller | None:
    """Return the next connection in the queue of a non-blocking listener, or None if there is no intact one.

    `turn_away` gets the reason and the name for each connection of another user. Raises OSError if the listener cannot
    accept: see `_is_shortage`.
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
            return _Caller(sock, source_of(host), f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        process, user = process_and_user(sock)
        if user == os.geteuid():
            return _Caller(sock, "", f"process {process}")
        sock.close()
        turn_away(ANOTHER_USER, f"process {process} of user {user}")
    return None


def _is_shortage(error: OSError) -> bool:
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
