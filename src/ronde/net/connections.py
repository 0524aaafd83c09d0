"""Opens all connections of one communicator at once: calls the lower ranks, answers the higher ones.

The rules:
  1. One loop over all sockets, none of which blocks; it ends when every slot has its connection, at the deadline, or
     when a peer turns out to be gone: only its machine's refusal of a call says that for certain.
  2. Both ends prove that they know the job key before a connection counts. The label in the proven hello says which
     slot it is for. A connection that proves nothing is dropped and costs nobody anything (reception.py).
  3. A call that breaks before it counts is made again until the deadline: the peer may have a crowd of strangers.
  4. A control connection that has been established is watched for its end while others are still missing.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import NamedTuple

from ronde.errors import AuthenticationError, PeerLostError, ProtocolError, TimeoutError
from ronde.job_key import JobKey
from ronde.net.addresses import LOOPBACK_REMEDY, Address, is_loopback, resolve
from ronde.net.authenticating_listener import Newcomer, Reception
from ronde.net.authentication import Handshake, Role
from ronde.net.peers import check_user
from ronde.net.protection import ConnectionKeys, protection_of

__all__ = ["Channel", "Connection", "Slot", "named_ranks", "open_connections"]

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 10 * 10**6, 500 * 10**6  # before a broken call is made again
CHECK_INTERVAL_NS = 100 * 10**6
# What breaks a call that its peer may take when it is made again.
_BROKEN = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

_LABEL = struct.Struct("!IHH8x")
_log = logging.getLogger(__name__)


class Channel(IntEnum):
    """What a connection is for. The numbers travel between ranks."""

    CONTROL = 1  # goodbyes, aborts, descriptors; its end means that the peer has died
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


class _Dial:
    """A slot that we open, and the connection on which the handshake for it is not done yet."""

    def __init__(self, slot: Slot, address: Address) -> None:
        self.slot = slot
        self.address = address
        self.pause_ns = FIRST_PAUSE_NS
        self.sock: socket.socket | None = None
        self.handshake: Handshake | None = None
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
    check: Callable[[], None] | None = None,
) -> dict[Slot, Connection]:
    """Return a non-blocking connection for every slot of `calls` (opened by us) and `answers` (by the peers).

    `hosts` are the names of the ranks' machines, for messages; `listeners` listening, non-blocking sockets, which stay
    open; `deadline_ns` a value of `time.monotonic_ns()`; with `is_secret` they are encrypted. `check` is called now and
    then, and what it raises ends the attempt. Raises TimeoutError that names the missing ranks, PeerLostError,
    AuthenticationError or VersionError; then no connection is left open.
    """
    opening = _Opening(
        rank, hosts, listeners, set(calls) | set(answers), key, purpose, deadline_ns, is_secret
    )
    try:
        for slot, address in calls.items():
            opening.call(_Dial(slot, address))
        opening.run(check)
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
        listeners: Iterable[socket.socket],
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
        self._addresses: dict[Slot, Address] = {}  # of those that we call
        self._key = key
        self._purpose = purpose
        self._deadline_ns = deadline_ns
        self._is_secret = is_secret
        self._started_ns = time.monotonic_ns()
        self._calls: dict[int, _Dial] = {}  # under way, by descriptor
        self._broken_calls: list[tuple[int, _Dial]] = []  # with the time when they are made again
        self._watched: dict[int, Slot] = {}
        self._epoll = select.epoll()
        self._reception = Reception(
            listeners, f"rank {rank}", lambda sock: self._handshake(Role.SERVER, sock), _raise, self._epoll
        )

    def close(self) -> None:
        """Close what never became a connection, and the poll."""
        for call in self._calls.values():
            if call.sock:
                call.sock.close()
        self._reception.close()
        self._epoll.close()

    def _handshake(self, role: Role, sock: socket.socket, slot: Slot | None = None) -> Handshake:
        label = _LABEL.pack(self._rank, slot.channel, slot.stream) if slot else _LABEL.pack(self._rank, 0, 0)
        return Handshake(role, self._key, self._purpose, protection_of(sock, self._is_secret), label)

    # Calls

    def call(self, call: _Dial) -> None:
        """Begin to connect."""
        self._addresses[call.slot] = call.address
        endpoint = resolve(call.address)[0]
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            with self._described_errors(call.slot):
                if call.address.is_unix:
                    self._connect_unix(sock, endpoint.sockaddr)
                    check_user(sock)
                sock.setblocking(False)
                error = 0 if call.address.is_unix else sock.connect_ex(endpoint.sockaddr)
                if error not in (0, errno.EINPROGRESS):
                    raise OSError(error, os.strerror(error))
        except BaseException:
            sock.close()
            raise
        call.sock = sock
        call.handshake = self._handshake(Role.CLIENT, sock, call.slot)
        call.inbox = b""
        self._calls[sock.fileno()] = call
        self._epoll.register(sock.fileno(), select.EPOLLOUT)

    def _connect_unix(self, sock: socket.socket, sockaddr: object) -> None:
        """Connect within the deadline. A Unix socket whose queue is full can only be waited for by blocking.

        No circle of ranks waits here for one another, because everybody calls lower ranks only.
        """
        left_us = max(1, (self._deadline_ns - time.monotonic_ns()) // 1000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@qq", *divmod(left_us, 10**6)))
        sock.connect(sockaddr)  # type: ignore[arg-type]

    def _advance(self, call: _Dial, events: int) -> None:
        assert call.sock
        assert call.handshake
        with self._described_errors(call.slot):
            try:
                if events & select.EPOLLOUT:
                    self._greet(call.sock, call.handshake)
                else:
                    self._read(call, call.sock, call.handshake)
            except BlockingIOError:
                pass
            except _BROKEN:
                self._forget(call).close()
                self._broken_calls.append((time.monotonic_ns() + call.pause_ns, call))
                call.pause_ns = min(2 * call.pause_ns, LONGEST_PAUSE_NS)
            except ProtocolError:
                with suppress(OSError):
                    call.sock.send(call.handshake.farewell())
                raise

    def _greet(self, sock: socket.socket, handshake: Handshake) -> None:
        """The connection stands, or has failed."""
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        sock.sendall(handshake.greeting())  # far smaller than an empty socket's buffer
        self._epoll.modify(sock.fileno(), select.EPOLLIN)

    def _read(self, call: _Dial, sock: socket.socket, handshake: Handshake) -> None:
        data = sock.recv(handshake.wanted - len(call.inbox))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        call.inbox += data
        if len(call.inbox) < handshake.wanted:
            handshake.check_beginning(call.inbox)
            return
        sock.sendall(handshake.advance(call.inbox))
        call.inbox = b""
        if handshake.wanted:
            return
        peer = _LABEL.unpack(handshake.peer_label)[0]
        if peer != call.slot.peer:
            raise AuthenticationError(f"rank {peer} answered in its place")
        self._establish(call.slot, self._forget(call), handshake)

    def _forget(self, call: _Dial) -> socket.socket:
        sock, call.sock = call.sock, None
        assert sock
        del self._calls[sock.fileno()]
        self._epoll.unregister(sock.fileno())
        return sock

    # All connections

    def run(self, check: Callable[[], None] | None = None) -> None:
        while self._missing:
            now_ns = time.monotonic_ns()
            if now_ns >= self._deadline_ns:
                raise self._timeout()
            wake_ns = self._wake_ns()
            if check is not None:
                check()
                wake_ns = min(wake_ns, now_ns + CHECK_INTERVAL_NS)
            for fd, events in self._epoll.poll((wake_ns - now_ns) / 1e9):
                if (call := self._calls.get(fd)) is not None:
                    self._advance(call, events)
                elif (slot := self._watched.get(fd)) is not None:
                    self._look_whether_alive(slot)
                elif fd in self._reception and (newcomer := self._reception.serve(fd)):
                    self._welcome(newcomer)
            now_ns = time.monotonic_ns()
            self._reception.tick(now_ns)
            due = [call for at_ns, call in self._broken_calls if at_ns <= now_ns]
            self._broken_calls = [entry for entry in self._broken_calls if entry[0] > now_ns]
            for call in due:
                self.call(call)

    def _wake_ns(self) -> int:
        """When to look again, though no socket is ready."""
        times = [self._deadline_ns, *(at_ns for at_ns, _ in self._broken_calls)]
        if (wake_ns := self._reception.wake_ns) is not None:
            times.append(wake_ns)
        return max(min(times), time.monotonic_ns())

    def _welcome(self, newcomer: Newcomer) -> None:
        """A peer has called."""
        peer, channel, stream = _LABEL.unpack(newcomer.handshake.peer_label)
        slot = Slot(peer, channel, stream)
        self._epoll.unregister(newcomer.sock.fileno())
        if slot in self._missing and slot not in self._addresses:
            self._establish(Slot(peer, Channel(channel), stream), *newcomer)
            return
        _log.warning("rank %d did not expect a call of rank %d (channel %d, stream %d)", self._rank, *slot)
        newcomer.sock.close()

    def _establish(self, slot: Slot, sock: socket.socket, handshake: Handshake) -> None:
        self.done[slot] = Connection(sock, handshake.keys)
        self._missing.remove(slot)
        if slot.channel is Channel.CONTROL:
            self._watched[sock.fileno()] = slot
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _look_whether_alive(self, slot: Slot) -> None:
        sock = self.done[slot].sock
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        except OSError as error:
            raise self._unreachable(slot, error) from None
        # It is ready before us and speaks already: that is for others to read.
        del self._watched[sock.fileno()]
        self._epoll.unregister(sock.fileno())

    @contextmanager
    def _described_errors(self, slot: Slot) -> Iterator[None]:
        """Let errors say which peer they are about."""
        try:
            yield
        except ProtocolError as error:
            raise type(error)(f"{self._described(slot)}: {error}") from None
        except OSError as error:
            raise self._unreachable(slot, error) from None

    def _described(self, slot: Slot) -> str:
        address = f" at {self._addresses[slot]}" if slot in self._addresses else ""
        return f"rank {slot.peer} on {self._hosts[slot.peer]}{address}"

    def _unreachable(self, slot: Slot, error: OSError) -> PeerLostError:
        message = f"cannot connect to {self._described(slot)}: {error.strerror or error}"
        address = self._addresses.get(slot)
        if error.errno == errno.ENETUNREACH and address is not None and is_loopback(address.host):
            message += f"; {LOOPBACK_REMEDY}"
        return PeerLostError(message, slot.peer, self._hosts[slot.peer])

    def _timeout(self) -> TimeoutError:
        waited_ns = time.monotonic_ns() - self._started_ns
        missing = sorted({slot.peer for slot in self._missing})
        called = sorted({self._described(slot) for slot in self._missing if slot in self._addresses})
        message = (
            f"waited {waited_ns / 1e9:.3g} s for {named_ranks(missing)} of {len(self._hosts)} to connect"
        )
        if called:
            message += f"; no answer from {called[0]}"
        if self._reception.refusals.summary:
            message += f"; this rank {self._reception.refusals.summary}"
        return TimeoutError(message, operation="init", waited_ns=waited_ns, missing=tuple(missing))


def _raise(error: OSError) -> None:
    """Let a listener that cannot accept be the end: nobody else would make room."""
    raise error
