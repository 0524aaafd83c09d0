"""Serves a store over TCP or a Unix socket, from one thread of its own.

The rules:
  1. A connection is a stranger until it has proved that it knows the job key. Nothing it sends before is parsed beyond
     the fixed-size handshake; it has ten seconds; and when there are too many strangers, the oldest one goes.
  2. A member has one request at a time. A request that must wait is parked under its key and answered by whoever sets
     the key, or by its timer; nobody polls.
  3. Whatever one client does wrong costs that client its connection and nobody else anything.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import selectors
import socket
import threading
import time

from ronde.errors import ProtocolError, UsageError
from ronde.net.addresses import listen, parse
from ronde.net.authentication import Handshake, Role
from ronde.net.frames import FrameReader, frame
from ronde.net.stores.base import VALUE_LIMIT_BYTES
from ronde.net.stores.table import Table
from ronde.net.stores.wire import FRAME_LIMIT_BYTES, Operation, Request, Status, answer
from ronde.settings import JobKey

__all__ = ["STORE_PURPOSE", "StoreServer"]

STORE_PURPOSE = "store"
MAX_CLIENTS = 20_000
MAX_STRANGERS = 256
HANDSHAKE_NS = 10 * 10**9
READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


class _Client:
    """One connection: a stranger while `handshake` is there, waiting for `parked` while that is set."""

    __slots__ = ("handshake", "inbox", "outbox", "parked", "reader", "sock", "timer")

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        self.sock = sock
        self.handshake: Handshake | None = handshake
        self.inbox = b""
        self.outbox = b""
        self.reader = FrameReader(FRAME_LIMIT_BYTES)
        self.parked: Request | None = None
        self.timer = 0  # number of the timer that is set; 0: none


class StoreServer:
    """A store at `address` (`unix:...`, `tcp:host:port`; port 0: any free one) for those who know the key.

    Raises UsageError if the address is taken or not ours.
    """

    def __init__(self, address: str, key: JobKey) -> None:
        self._key = key
        self._listener, self._address = listen(parse(address))
        self._table = Table()
        self._clients: dict[_Client, None] = {}
        self._strangers: dict[_Client, None] = {}
        self._waiters: dict[bytes, dict[_Client, None]] = {}
        self._timers: list[tuple[int, int, _Client]] = []
        self._timer_count = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepting = True
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ronde-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address with the port that it really has."""
        return str(self._address)

    def close(self) -> None:
        """Stop serving, hang up on all clients, and free the address. A second call does nothing."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._seconds_to_next_timer()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fd == self._stop:
                        return
                    elif key.data in self._clients:  # else dropped earlier in this round
                        self._serve(key.data, events)
                self._expire()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._stop)
        if self._address.path.startswith("/"):
            os.unlink(self._address.path)

    # Connections

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    _log.error(
                        "the store has run out of file descriptors with %d clients", len(self._clients)
                    )
                    self._pause_accepting()
                    return
                continue  # that one connection broke before we took it
            sock.setblocking(False)
            if not self._address.is_unix:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = _Client(sock, Handshake(Role.SERVER, self._key, STORE_PURPOSE))
            self._clients[client] = self._strangers[client] = None
            self._selector.register(sock, selectors.EVENT_READ, client)
            self._set_timer(client, HANDSHAKE_NS)
            if len(self._strangers) > MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))
            if len(self._clients) >= MAX_CLIENTS:
                self._pause_accepting()
                return

    def _pause_accepting(self) -> None:
        """Leave newcomers in the queue of the socket until a client goes."""
        self._selector.unregister(self._listener)
        self._accepting = False

    def _drop(self, client: _Client) -> None:
        del self._clients[client]
        self._strangers.pop(client, None)
        self._unpark(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                self._read(client)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
        except ProtocolError as error:
            _log.warning("the store at %s turned a connection away: %s", self._address, error)
            self._drop(client)

    def _read(self, client: _Client) -> None:
        handshake = client.handshake
        if handshake is None:
            data = client.sock.recv(READ_BYTES)
            for payload in client.reader.feed(data):
                self._answer(client, Request.decode(payload))
        else:
            data = client.sock.recv(handshake.wanted - len(client.inbox))
            self._greet(client, handshake, data)
        if not data:
            raise ConnectionResetError("hung up")

    def _greet(self, client: _Client, handshake: Handshake, data: bytes) -> None:
        client.inbox += data
        if len(client.inbox) < handshake.wanted:
            return
        self._send(client, handshake.advance(client.inbox))
        client.inbox = b""
        if not handshake.wanted:
            client.handshake = None
            client.timer = 0
            del self._strangers[client]

    def _send(self, client: _Client, data: bytes) -> None:
        if data:
            client.outbox += data
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            sent = client.sock.send(client.outbox)
        except BlockingIOError:
            sent = 0
        client.outbox = client.outbox[sent:]
        more = selectors.EVENT_WRITE if client.outbox else 0
        if self._selector.get_key(client.sock).events != selectors.EVENT_READ | more:
            self._selector.modify(client.sock, selectors.EVENT_READ | more, client)

    # Requests

    def _answer(self, client: _Client, request: Request) -> None:
        if client.parked:
            raise ProtocolError("a client of the store asks again while it waits for an answer")
        try:
            payload = self._perform(request)
        except UsageError as error:
            payload = answer(Status.REFUSED, str(error).encode())
        if payload is not None:
            self._send(client, frame(payload))
        elif request.timeout_ns == 0:
            self._send(client, frame(answer(Status.ABSENT)))
        else:
            client.parked = request
            self._waiters.setdefault(request.key, {})[client] = None
            self._set_timer(client, request.timeout_ns)

    def _perform(self, request: Request) -> bytes | None:
        """Return the answer, or None if the key has to come first."""
        match request.operation:
            case Operation.GET | Operation.WAIT:
                value = self._table.get(request.key)
                return None if value is None else _answer_with(request, value)
            case Operation.SET:
                self._table.set(request.key, _within_limit(request.argument))
                self._wake(request.key)
                return answer(Status.OK)
            case Operation.ADD:
                total = self._table.add(request.key, _number(request.argument))
                self._wake(request.key)
                return answer(Status.OK, b"%d" % total)
            case Operation.COMPARE_SET:
                expected, desired = request.expected_and_desired()
                value = self._table.compare_set(request.key, expected, _within_limit(desired))
                self._wake(request.key)
                return answer(Status.OK, value)
            case Operation.DELETE:
                return answer(Status.OK if self._table.delete(request.key) else Status.ABSENT)

    def _wake(self, key: bytes) -> None:
        value = self._table.get(key)
        if value is None:
            return
        for client in self._waiters.pop(key, {}):
            request, client.parked, client.timer = client.parked, None, 0
            assert request is not None
            try:
                self._send(client, frame(_answer_with(request, value)))
            except OSError:
                self._drop(client)

    def _unpark(self, client: _Client) -> None:
        if client.parked:
            waiters = self._waiters.get(client.parked.key, {})
            waiters.pop(client, None)
            if not waiters:
                self._waiters.pop(client.parked.key, None)
            client.parked = None
        client.timer = 0

    # Timers: a heap in which a timer that is no longer its client's counts for nothing

    def _set_timer(self, client: _Client, after_ns: int) -> None:
        if len(self._timers) > 2 * len(self._clients) + 64:
            self._timers = [entry for entry in self._timers if entry[2].timer == entry[1]]
            heapq.heapify(self._timers)
        self._timer_count += 1
        client.timer = self._timer_count
        heapq.heappush(self._timers, (time.monotonic_ns() + after_ns, client.timer, client))

    def _seconds_to_next_timer(self) -> float | None:
        while self._timers and self._timers[0][2].timer != self._timers[0][1]:
            heapq.heappop(self._timers)
        return max(0.0, (self._timers[0][0] - time.monotonic_ns()) / 1e9) if self._timers else None

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        while self._timers and self._timers[0][0] <= now_ns:
            _, number, client = heapq.heappop(self._timers)
            if client.timer != number:
                continue
            if client.handshake:
                self._drop(client)
                continue
            self._unpark(client)
            try:
                self._send(client, frame(answer(Status.ABSENT)))
            except OSError:
                self._drop(client)


def _answer_with(request: Request, value: bytes) -> bytes:
    return answer(Status.OK, value if request.operation is Operation.GET else b"")


def _within_limit(value: bytes) -> bytes:
    if len(value) > VALUE_LIMIT_BYTES:
        raise ProtocolError(
            f"a value of {len(value)} bytes came where at most {VALUE_LIMIT_BYTES} are allowed"
        )
    return value


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError("a number that is none came with a request to the store") from None
