"""Opens all connections of one communicator at once: connects to the lower ranks, accepts the higher ones.

The rules:
  1. One loop serves all sockets, and none blocks. It ends when every slot has its connection, at the deadline, or when
     a peer is certainly gone: when its machine refuses the connection.
  2. A connection counts once both ends have proved that they know the job key. The label in the proven hello names its
     slot. `net/authenticating_listener` closes connections that prove nothing.
  3. An attempt that breaks before that is repeated until the deadline: a peer with too many unauthenticated connections
     closes some of them. So does a peer that listens for several worlds, one after the other: a *tag* in the label
     tells to which one a connection belongs, and those of another one are closed.
  4. The loop watches established control connections for their end while others are missing. The caller can *adopt*
     them, to read what they say: all of them once one has something to say or the attempt fails, then each new one.
  5. Where a missing rank must be listening at a Unix socket by now, the loop looks whether it still does.
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
from ronde.net.authenticating_listener import AuthenticatedConnection, Authenticator
from ronde.net.authentication import ConnectionKeys, Handshake, Role, protection_of
from ronde.net.descriptors import OwnSocket
from ronde.net.unix_peers import check_user

__all__ = ["NO_TAG", "Channel", "Connection", "Slot", "named_ranks", "open_connections"]

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 10 * 10**6, 500 * 10**6  # before a broken attempt is made again
CHECK_INTERVAL_NS = 100 * 10**6
NOTICE_NS, NOTICE_GROWTH = 10**10, 6  # when to log which ranks are missing; then after so many times as long
FIRST_LOOK_NS, LONGEST_LOOK_NS = 200 * 10**6, 5 * 10**9  # between looks whether missing ranks listen
NO_TAG = bytes(8)
# Errors after which the next attempt may succeed.
_BROKEN = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

_LABEL = struct.Struct("!IHH8s")
_log = logging.getLogger(__name__)


class Channel(IntEnum):
    """The use of a connection. The numbers travel between ranks."""

    CONTROL = 1  # goodbyes, aborts, descriptors; its end means that the peer has died
    DATA = 3  # tensors


class Slot(NamedTuple):
    """One connection that a communicator needs: its peer, its use, and its number among several."""

    peer: int
    channel: Channel
    stream: int = 0


class Connection(NamedTuple):
    """An established connection. `keys`: of its messages; None for a Unix socket."""

    sock: socket.socket
    keys: ConnectionKeys | None


class _Attempt:
    """A slot that this rank opens, and its connection until the handshake is complete."""

    def __init__(self, slot: Slot, address: Address) -> None:
        self.slot = slot
        self.address = address
        self.pause_ns = FIRST_PAUSE_NS
        self.sock: socket.socket | None = None
        self.handshake: Handshake | None = None
        self.inbox = b""


def named_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 3, 5"; the first 16 of many."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16]))
    more = f" and {len(listed) - 16} more" if len(listed) > 16 else ""
    return f"rank{'s' if len(listed) > 1 else ''} {shown}{more}"


def open_connections(
    rank: int,
    hosts: list[str],
    listeners: Iterable[socket.socket],
    outgoing: Mapping[Slot, Address],
    incoming: Iterable[Slot],
    key: JobKey,
    purpose: str,
    deadline_ns: int,
    is_secret: bool = False,
    check: Callable[[], None] | None = None,
    tag: bytes = NO_TAG,
    adopt: Callable[[Mapping[Slot, Connection]], None] | None = None,
    listening: Mapping[int, Address] | None = None,
) -> dict[Slot, Connection]:
    """Return a non-blocking connection for every slot of `outgoing` (this rank connects) and `incoming` (peers do).

    `hosts`: the names of the ranks' machines, for messages. `listeners`: listening, non-blocking sockets, which stay
    open. `deadline_ns`: a value of `time.monotonic_ns()`. `is_secret`: encrypt the connections. `check`: called
    regularly; an exception that it raises ends the attempts. `tag`, 8 bytes: of the world, at listeners that serve
    several. `adopt`: takes control connections over (rule 4); the result lacks them, and `check` reports their ends.
    `listening`: by rank, the addresses at which ranks listen for as long as they live (rule 5).

    Raises TimeoutError that names the missing ranks, PeerLostError, AuthenticationError or VersionError, and then
    leaves no connection open but those that were adopted.
    """
    opening = _Opening(
        rank,
        hosts,
        listeners,
        set(outgoing) | set(incoming),
        key,
        purpose,
        deadline_ns,
        is_secret,
        tag,
        adopt,
    )
    opening.listening = listening or {}
    try:
        for slot, address in outgoing.items():
            opening.begin_attempt(_Attempt(slot, address))
        opening.run_loop(check)
    except BaseException:
        opening.adopt_controls()
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
        tag: bytes,
        adopt: Callable[[Mapping[Slot, Connection]], None] | None,
    ) -> None:
        self.done: dict[Slot, Connection] = {}
        self._rank = rank
        self._hosts = hosts
        self._missing = missing
        self._addresses: dict[Slot, Address] = {}  # of the outgoing slots
        self._key = key
        self._purpose = purpose
        self._deadline_ns = deadline_ns
        self._is_secret = is_secret
        self._tag = tag
        self._adopt = adopt
        self._adopts_at_once = False
        self._notice_ns = NOTICE_NS
        self.listening: Mapping[int, Address] = {}
        self._look_ns = FIRST_LOOK_NS  # since the start
        self._started_ns = time.monotonic_ns()
        self._attempts: dict[int, _Attempt] = {}  # under way, by descriptor
        self._retries: list[tuple[int, _Attempt]] = []  # with the time of the next attempt
        self._watched: dict[int, Slot] = {}
        self._epoll = select.epoll()
        # Not a method: a reference to this object would keep it and its sockets until the next garbage collection.
        label = _LABEL.pack(rank, 0, 0, tag)
        self._authenticator = Authenticator(
            listeners,
            f"rank {rank}",
            lambda sock: Handshake(
                Role.SERVER,
                key,
                purpose,
                protection_of(sock, is_secret),
                label,
                lambda theirs: _LABEL.unpack(theirs)[3] == tag,
            ),
            _raise_error,
            self._epoll,
        )

    def close(self) -> None:
        """Close unfinished attempts, strangers and the poll."""
        for attempt in self._attempts.values():
            if attempt.sock:
                attempt.sock.close()
        self._authenticator.close()
        self._epoll.close()

    def _handshake(self, sock: socket.socket, slot: Slot) -> Handshake:
        label = _LABEL.pack(self._rank, slot.channel, slot.stream, self._tag)
        return Handshake(Role.CLIENT, self._key, self._purpose, protection_of(sock, self._is_secret), label)

    # Attempts

    def begin_attempt(self, attempt: _Attempt) -> None:
        """Begin to connect, and register the socket."""
        self._addresses[attempt.slot] = attempt.address
        endpoint = resolve(attempt.address)[0]
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
        try:
            with self._described_errors(attempt.slot):
                if attempt.address.is_unix:
                    self._connect_unix(sock, endpoint.sockaddr)
                    check_user(sock)
                sock.setblocking(False)
                error = 0 if attempt.address.is_unix else sock.connect_ex(endpoint.sockaddr)
                if error not in (0, errno.EINPROGRESS):
                    raise OSError(error, os.strerror(error))
        except BaseException:
            sock.close()
            raise
        attempt.sock = sock
        attempt.handshake = self._handshake(sock, attempt.slot)
        attempt.inbox = b""
        self._attempts[sock.fileno()] = attempt
        self._epoll.register(sock.fileno(), select.EPOLLOUT)

    def _connect_unix(self, sock: socket.socket, sockaddr: object) -> None:
        """Connect before the deadline. The only way to wait for a Unix socket with a full queue is to block.

        Ranks cannot wait here in a circle, because each connects to lower ranks only.
        """
        left_us = max(1, (self._deadline_ns - time.monotonic_ns()) // 1000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@qq", *divmod(left_us, 10**6)))
        sock.connect(sockaddr)  # type: ignore[arg-type]

    def _advance_attempt(self, attempt: _Attempt, events: int) -> None:
        assert attempt.sock
        assert attempt.handshake
        with self._described_errors(attempt.slot):
            try:
                if events & select.EPOLLOUT:
                    self._send_greeting(attempt.sock, attempt.handshake)
                else:
                    self._read_handshake(attempt, attempt.sock, attempt.handshake)
            except BlockingIOError:
                pass
            except _BROKEN:
                self._remove_attempt(attempt).close()
                self._retries.append((time.monotonic_ns() + attempt.pause_ns, attempt))
                attempt.pause_ns = min(2 * attempt.pause_ns, LONGEST_PAUSE_NS)
            except ProtocolError:
                with suppress(OSError):
                    attempt.sock.send(attempt.handshake.farewell())
                raise

    def _send_greeting(self, sock: socket.socket, handshake: Handshake) -> None:
        """Send the greeting on a connection that is open now. Raises OSError if it has failed."""
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        sock.sendall(handshake.greeting())  # far smaller than an empty socket's buffer
        self._epoll.modify(sock.fileno(), select.EPOLLIN)

    def _read_handshake(self, attempt: _Attempt, sock: socket.socket, handshake: Handshake) -> None:
        data = sock.recv(handshake.wanted - len(attempt.inbox))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        attempt.inbox += data
        if len(attempt.inbox) < handshake.wanted:
            handshake.check_beginning(attempt.inbox)
            return
        answer = handshake.advance(attempt.inbox)
        attempt.inbox = b""
        if answer:  # to send nothing fails, too, if a peer that was complete first has left already
            sock.sendall(answer)
        if handshake.wanted:
            return
        peer = _LABEL.unpack(handshake.peer_label)[0]
        if peer != attempt.slot.peer:
            raise AuthenticationError(f"rank {peer} answered in its place")
        self._establish(attempt.slot, self._remove_attempt(attempt), handshake)

    def _remove_attempt(self, attempt: _Attempt) -> socket.socket:
        sock, attempt.sock = attempt.sock, None
        assert sock
        del self._attempts[sock.fileno()]
        self._epoll.unregister(sock.fileno())
        return sock

    # All connections

    def run_loop(self, check: Callable[[], None] | None = None) -> None:
        while self._missing:
            now_ns = time.monotonic_ns()
            if now_ns >= self._deadline_ns:
                raise self._timeout()
            wake_ns = self._wake_ns()
            if check is not None:
                check()
                wake_ns = min(wake_ns, now_ns + CHECK_INTERVAL_NS)
            for fd, events in self._epoll.poll((wake_ns - now_ns) / 1e9):
                if (attempt := self._attempts.get(fd)) is not None:
                    self._advance_attempt(attempt, events)
                elif (slot := self._watched.get(fd)) is not None:
                    self._check_liveness(slot)
                elif fd in self._authenticator and (newcomer := self._authenticator.handle_ready(fd)):
                    self._accept_connection(newcomer)
            now_ns = time.monotonic_ns()
            self._log_if_late(now_ns)
            self._look_for_missing(now_ns)
            self._authenticator.tick(now_ns)
            due = [attempt for at_ns, attempt in self._retries if at_ns <= now_ns]
            self._retries = [entry for entry in self._retries if entry[0] > now_ns]
            for attempt in due:
                self.begin_attempt(attempt)

    def _wake_ns(self) -> int:
        """When to go on without a ready socket."""
        times = [
            self._deadline_ns,
            self._started_ns + self._notice_ns,
            *(at_ns for at_ns, _ in self._retries),
        ]
        if self.listening:
            times.append(self._started_ns + self._look_ns)
        if (wake_ns := self._authenticator.wake_ns) is not None:
            times.append(wake_ns)
        return max(min(times), time.monotonic_ns())

    def _accept_connection(self, newcomer: AuthenticatedConnection) -> None:
        """Take over a connection that a peer has opened."""
        peer, channel, stream, _ = _LABEL.unpack(newcomer.handshake.peer_label)
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
            if self._adopts_at_once:
                self.adopt_controls()

    def adopt_controls(self) -> None:
        """Hand the control connections over, if somebody adopts them; from now on each one at once."""
        if self._adopt is None:
            return
        self._adopts_at_once = True
        for descriptor in self._watched:
            self._epoll.unregister(descriptor)
        slots = list(self._watched.values())
        self._watched.clear()
        self._adopt({slot: self.done.pop(slot) for slot in slots})

    def _check_liveness(self, slot: Slot) -> None:
        if self._adopt is not None:
            self.adopt_controls()
            return
        sock = self.done[slot].sock
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        except OSError as error:
            raise self._unreachable(slot, error) from None
        # The peer is ready and sends already; the communicator will read that.
        del self._watched[sock.fileno()]
        self._epoll.unregister(sock.fileno())

    @contextmanager
    def _described_errors(self, slot: Slot) -> Iterator[None]:
        """Add the peer to errors."""
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

    def _look_for_missing(self, now_ns: int) -> None:
        """Raise PeerLostError if a missing rank that would connect to this one listens no more."""
        waited_ns = now_ns - self._started_ns
        if not self.listening or waited_ns < self._look_ns:
            return
        self._look_ns = waited_ns + min(2 * self._look_ns, LONGEST_LOOK_NS)
        for slot in sorted(self._missing - self._addresses.keys()):
            address = self.listening[slot.peer]
            if not address.is_unix or slot.channel is not Channel.CONTROL:
                continue
            with OwnSocket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                error = probe.connect_ex(resolve(address)[0].sockaddr)
            if error == errno.ECONNREFUSED:
                message = f"{self._described(slot)} has ended, or its process group was destroyed"
                raise PeerLostError(message, slot.peer, self._hosts[slot.peer])

    def _log_if_late(self, now_ns: int) -> None:
        waited_ns = now_ns - self._started_ns
        if self._missing and waited_ns >= self._notice_ns:
            self._notice_ns *= NOTICE_GROWTH
            missing = named_ranks({slot.peer for slot in self._missing})
            _log.warning(
                "rank %d has waited %.3g s for %s of %d to connect",
                *(self._rank, waited_ns / 1e9, missing, len(self._hosts)),
            )

    def _timeout(self) -> TimeoutError:
        waited_ns = time.monotonic_ns() - self._started_ns
        missing = sorted({slot.peer for slot in self._missing})
        called = sorted({self._described(slot) for slot in self._missing if slot in self._addresses})
        message = (
            f"waited {waited_ns / 1e9:.3g} s for {named_ranks(missing)} of {len(self._hosts)} to connect"
        )
        if called:
            message += f"; no answer from {called[0]}"
        if self._authenticator.refusals.summary:
            message += f"; this rank {self._authenticator.refusals.summary}"
        return TimeoutError(message, operation="init", waited_ns=waited_ns, missing=tuple(missing))


def _raise_error(error: OSError) -> None:
    """End the attempt: while it lasts, nothing else in this process frees descriptors."""
    raise error
