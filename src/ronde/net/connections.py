"""Opens all connections of one communicator at once: calls the lower ranks, answers the higher ones.

The rules:
  1. One loop over all sockets, none of which blocks; it ends when every slot has its connection, at the deadline, or
     when a peer turns out to be gone.
  2. Both ends prove that they know the job key before a connection counts. The label in the proven hello says which
     slot it is for. A connection that proves nothing is dropped and costs nobody anything.
  3. A control connection that has been established is watched for its end while others are still missing.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from ronde.errors import AuthenticationError, PeerLostError, ProtocolError, TimeoutError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, resolve
from ronde.net.authentication import Handshake, Role
from ronde.net.peers import check_user
from ronde.net.protection import ConnectionKeys, protection_of

__all__ = ["Channel", "Connection", "Slot", "named_ranks", "open_connections"]

MAX_STRANGERS = 256

_LABEL = struct.Struct("!IHH8x")
_log = logging.getLogger(__name__)


class Channel(IntEnum):
    """What a connection is for. The numbers travel between ranks."""

    CONTROL = 1  # goodbyes and aborts; its end means that the peer has died
    LANE = 2  # file descriptors, between a host's leader and its other ranks
    DATA = 3  # tensors


class Slot(NamedTuple):
    """One connection that a communicator needs: to whom, what for, and which of several."""

    peer: int
    channel: Channel
    stream: int = 0


class Connection(NamedTuple):
    """One that stands; `keys` are those of its messages, None if it is a Unix socket."""

    sock: socket.socket
    keys: ConnectionKeys | None


class _Pending:
    """A connection whose handshake is not done; `slot` is None if the other end opened it."""

    def __init__(self, sock: socket.socket, handshake: Handshake, slot: Slot | None) -> None:
        self.sock = sock
        self.handshake = handshake
        self.slot = slot
        self.inbox = b""


def named_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 3, 5"; of very many, the first."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16]))
    more = f" and {len(listed) - 16} more" if len(listed) > 16 else ""
    return f"rank{'s' if len(listed) > 1 else ''} {shown}{more}"


def open_connections(
    rank: int,
    hosts: list[str],
    listeners: Iterable[socket.socket],
    calls: Mapping[Slot, Address],
    answers: Iterable[Slot],
    key: JobKey,
    purpose: str,
    deadline_ns: int,
    is_secret: bool = False,
) -> dict[Slot, Connection]:
    """Return a non-blocking connection for every slot of `calls` (opened by us) and `answers` (by the peers).

    `hosts` are the names of the ranks' machines, for messages; `listeners` listening, non-blocking sockets, which stay
    open; `deadline_ns` a value of `time.monotonic_ns()`; with `is_secret` they are encrypted. Raises TimeoutError that
    names the missing ranks, PeerLostError, AuthenticationError or VersionError; then no connection is left open.
    """
    opening = _Opening(rank, hosts, set(calls) | set(answers), key, purpose, deadline_ns, is_secret)
    try:
        for listener in listeners:
            opening.listen(listener)
        for slot, address in calls.items():
            opening.call(slot, address)
        opening.run()
    except BaseException:
        for connection in opening.done.values():
            connection.sock.close()
        raise
    finally:
        opening.close()
    return opening.done


class _Opening:
    def __init__(
        self,
        rank: int,
        hosts: list[str],
        missing: set[Slot],
        key: JobKey,
        purpose: str,
        deadline_ns: int,
        is_secret: bool,
    ) -> None:
        self.done: dict[Slot, Connection] = {}
        self._rank = rank
        self._hosts = hosts
        self._missing = missing
        self._calls: dict[Slot, Address] = {}
        self._key = key
        self._purpose = purpose
        self._deadline_ns = deadline_ns
        self._is_secret = is_secret
        self._started_ns = time.monotonic_ns()
        self._strangers: dict[_Pending, None] = {}
        self._max_strangers = len(missing) + MAX_STRANGERS
        self._turned_away = ""
        self._selector = selectors.DefaultSelector()

    def close(self) -> None:
        """Close what never became a connection, and the selector."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Pending):
                key.data.sock.close()
        self._selector.close()

    def listen(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def call(self, slot: Slot, address: Address) -> None:
        self._calls[slot] = address
        endpoint = resolve(address)[0]
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        label = _LABEL.pack(self._rank, slot.channel, slot.stream)
        pending = _Pending(sock, self._handshake(Role.CLIENT, sock, label), slot)
        try:
            if address.is_unix:
                self._connect_unix(sock, endpoint.sockaddr)
                check_user(sock)
            sock.setblocking(False)
            error = 0 if address.is_unix else sock.connect_ex(endpoint.sockaddr)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except AuthenticationError as error:
            sock.close()
            raise AuthenticationError(f"{self._described(slot)}: {error}") from None
        except OSError as error:
            sock.close()
            raise self._unreachable(slot, error) from None
        self._selector.register(sock, selectors.EVENT_WRITE, pending)

    def _handshake(self, role: Role, sock: socket.socket, label: bytes) -> Handshake:
        return Handshake(role, self._key, self._purpose, protection_of(sock, self._is_secret), label)

    def _connect_unix(self, sock: socket.socket, sockaddr: object) -> None:
        """Connect within the deadline. A Unix socket whose queue is full can only be waited for by blocking.

        No circle of ranks waits here for one another, because everybody calls lower ranks only.
        """
        left_us = max(1, (self._deadline_ns - time.monotonic_ns()) // 1000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@qq", *divmod(left_us, 10**6)))
        sock.connect(sockaddr)  # type: ignore[arg-type]

    def run(self) -> None:
        while self._missing:
            left_ns = self._deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                raise self._timeout()
            for key, _ in self._selector.select(left_ns / 1e9):
                if isinstance(key.data, _Pending):
                    self._advance(key.data, key.events)
                elif isinstance(key.data, Slot):
                    self._look_whether_alive(key.data)
                else:
                    self._accept(key.data)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    raise
                continue  # that one connection broke before we took it
            sock.setblocking(False)
            label = _LABEL.pack(self._rank, 0, 0)
            pending = _Pending(sock, self._handshake(Role.SERVER, sock, label), None)
            self._selector.register(sock, selectors.EVENT_READ, pending)
            self._strangers[pending] = None
            try:
                check_user(sock)
            except AuthenticationError as error:
                self._drop(pending, str(error))
            if len(self._strangers) > self._max_strangers:
                self._drop(next(iter(self._strangers)), "too many strangers call")

    def _drop(self, pending: _Pending, reason: str) -> None:
        self._turned_away = reason
        _log.warning("rank %d turned a connection away: %s", self._rank, reason)
        self._strangers.pop(pending, None)
        self._selector.unregister(pending.sock)
        pending.sock.close()

    def _advance(self, pending: _Pending, events: int) -> None:
        if pending.slot is None and pending not in self._strangers:
            return  # dropped earlier in this round
        try:
            if events & selectors.EVENT_WRITE:
                self._greet(pending)
            else:
                self._read(pending)
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            if pending.slot is None:
                self._drop(pending, str(error))
            elif isinstance(error, ProtocolError):
                raise type(error)(f"{self._described(pending.slot)}: {error}") from None
            else:
                raise self._unreachable(pending.slot, error) from None

    def _greet(self, pending: _Pending) -> None:
        """The connection that we opened stands, or has failed."""
        error = pending.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        pending.sock.sendall(pending.handshake.greeting())  # far smaller than an empty socket's buffer
        self._selector.modify(pending.sock, selectors.EVENT_READ, pending)

    def _read(self, pending: _Pending) -> None:
        handshake = pending.handshake
        data = pending.sock.recv(handshake.wanted - len(pending.inbox))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        pending.inbox += data
        if len(pending.inbox) == handshake.wanted:
            pending.sock.sendall(handshake.advance(pending.inbox))
            pending.inbox = b""
        if not handshake.wanted:
            self._establish(pending)

    def _establish(self, pending: _Pending) -> None:
        peer, channel, stream = _LABEL.unpack(pending.handshake.peer_label)
        slot = pending.slot
        if slot is None:
            slot = Slot(peer, channel, stream)
            if slot not in self._missing or slot in self._calls:
                self._drop(
                    pending, f"rank {peer} is not expected to call (channel {channel}, stream {stream})"
                )
                return
            slot = Slot(peer, Channel(channel), stream)
        elif peer != slot.peer:
            raise AuthenticationError(f"rank {peer} answered in its place")
        self._strangers.pop(pending, None)
        self._selector.unregister(pending.sock)
        self.done[slot] = Connection(pending.sock, pending.handshake.keys)
        self._missing.remove(slot)
        if slot.channel is Channel.CONTROL:
            self._selector.register(pending.sock, selectors.EVENT_READ, slot)

    def _look_whether_alive(self, slot: Slot) -> None:
        sock = self.done[slot].sock
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        except OSError as error:
            raise self._unreachable(slot, error) from None
        self._selector.unregister(
            sock
        )  # it is ready before us and speaks already: that is for others to read

    def _described(self, slot: Slot) -> str:
        address = f" at {self._calls[slot]}" if slot in self._calls else ""
        return f"rank {slot.peer} on {self._hosts[slot.peer]}{address}"

    def _unreachable(self, slot: Slot, error: OSError) -> PeerLostError:
        message = f"cannot connect to {self._described(slot)}: {error.strerror or error}"
        return PeerLostError(message, slot.peer, self._hosts[slot.peer])

    def _timeout(self) -> TimeoutError:
        waited_ns = time.monotonic_ns() - self._started_ns
        missing = sorted({slot.peer for slot in self._missing})
        called = sorted({self._described(slot) for slot in self._missing if slot in self._calls})
        message = (
            f"waited {waited_ns / 1e9:.3g} s for {named_ranks(missing)} of {len(self._hosts)} to connect"
        )
        if called:
            message += f"; no answer from {called[0]}"
        if self._turned_away:
            message += f"; a connection was turned away: {self._turned_away}"
        return TimeoutError(message, operation="init", waited_ns=waited_ns, missing=tuple(missing))
