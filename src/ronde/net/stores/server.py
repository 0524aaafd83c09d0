"""Serves a store over TCP or a Unix socket, from one thread of its own.

The rules:
  1. A connection is a stranger until it has proved that it knows the job key. Nothing it sends before is parsed beyond
     the fixed-size handshake; it has ten seconds; and when there are too many strangers, the oldest one goes after half
     a second, and newcomers wait at the door until then.
  2. A member has one request at a time, and takes its answer before it asks again. A request that must wait is parked
     (see desk.py) and answered by whoever changes what it waits for, or by its timer; nobody polls.
  3. Whatever one client does wrong costs that client its connection and nobody else anything.
  4. A connection that breaks is noticed at once, or within seconds if no packet says so. What its client held goes with
     it; its last answer is kept, for it may come back.
  5. With a journal, whatever comes in one turn of the loop is answered only when its changes are on the disk. If they
     cannot be written, they are taken back and refused, and the store goes on with what it has.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ronde.errors import ProtocolError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import parse
from ronde.net.authentication import Handshake, Role
from ronde.net.stores.desk import Desk, Session
from ronde.net.stores.doors import MAX_CLIENTS, Doors
from ronde.net.stores.wire import FRAME_LIMIT_BYTES, LENGTH

if TYPE_CHECKING:
    from pathlib import Path

    from ronde.net.stores.journal import Journal

__all__ = ["HANDSHAKE_NS", "STORE_PURPOSE", "StoreServer"]

STORE_PURPOSE = "store"
MAX_STRANGERS = 256
HANDSHAKE_NS = 10 * 10**9
CROWDED_NS = HANDSHAKE_NS // 20  # what a stranger has while others wait at the door
LONGEST_SLEEP_S = 3600.0
READ_BYTES = 1 << 16
REPAIR_NS = 10**9  # how often to try again if the journal cannot be written

_log = logging.getLogger(__name__)
_length_of = LENGTH.unpack_from
_READABLE, _WRITABLE = select.EPOLLIN, select.EPOLLOUT


class _Client:
    """One connection: a stranger while `handshake` is there, a member with a `session` from then on."""

    __slots__ = ("fd", "handshake", "inbox", "outbox", "recv", "send", "session", "since_ns", "sock", "timer")

    def __init__(self, sock: socket.socket, handshake: Handshake, since_ns: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.recv = sock.recv
        self.send = sock.send
        self.handshake: Handshake | None = handshake
        self.session = Session()
        self.since_ns = since_ns
        self.inbox = bytearray()  # of a request of which only a part has come
        self.outbox = b""
        self.timer = 0  # number of the timer that is set; 0: none


class StoreServer:
    """A store at `address` (`unix:...`, `tcp:host:port`; port 0: any free one) for those who know the key.

    With a `journal` it goes on with what is in that file, and writes every change to it before it answers. With a
    `seed` it begins with what is in that journal of another store, on whatever node that was; its journal must be empty
    then. A `listener` that waits at the address already becomes the server's. Raises UsageError if the address is taken
    or not ours, or a file cannot be used.
    """

    def __init__(
        self,
        address: str,
        key: JobKey,
        journal: Path | None = None,
        seed: Path | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._key = key
        self._desk = Desk()
        self._doors = Doors(parse(address), key, listener)
        self._address = self._doors.address
        try:
            self._journal = self._open_journal(journal, seed)
        except BaseException:
            self._close_doors()
            raise
        self._answers: list[tuple[_Client, bytes]] = []  # held back until the journal is written
        self._clients: dict[int, _Client] = {}
        self._strangers: dict[_Client, None] = {}
        self._gone: list[Session] = []
        self._timers: list[tuple[int, int, _Client]] = []
        self._timer_count = 0
        self._repair_at_ns = 0
        self._epoll = select.epoll()
        self._doors.open(self._epoll)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        _servers.add(self)
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

    def wait(self) -> None:
        """Return when it serves no more: closed, or failed."""
        self._thread.join()

    def _open_journal(self, path: Path | None, seed: Path | None) -> Journal | None:
        if not path and not seed:
            return None
        from ronde.net.stores.journal import Journal, read  # only now: most stores have none

        now_ns = time.monotonic_ns()
        desk = self._desk
        if seed:
            for session in read(seed, desk.table)[0]:
                desk.remember(*session, now_ns)
        if not path:
            return None
        journal = Journal(path)
        try:
            if not seed:
                for session in journal.load(desk.table):
                    desk.remember(*session, now_ns)
            elif not journal.is_empty:
                raise UsageError(f"the journal {path} has something in it, which does not go with a seed")
            else:
                journal.rewrite(desk.table, desk.remembered())
        except OSError as error:
            journal.close()
            raise UsageError(f"cannot write the journal {path}: {error.strerror}") from None
        except BaseException:
            journal.close()
            raise
        return journal

    def _let_go(self) -> None:
        """Close what a forked child has inherited: it would keep open what its parent closes."""
        for client in self._clients.values():
            client.sock.close()
        self._doors.close()
        self._epoll.close()
        if self._journal:
            self._journal.close()

    # The loop

    def _run(self) -> None:
        try:
            while self._turn(self._epoll.poll(self._seconds_to_next_timer())):
                self._expire()
                while self._gone:
                    self._see_off(self._gone.pop())
        except BaseException:
            _log.exception("the store at %s has broken down", self._address)
            raise
        finally:
            self._close_all()

    def _turn(self, events: list[tuple[int, int]]) -> bool:
        """Serve whoever has something to say; return whether to go on."""
        if self._journal:
            self._repair()
            self._desk.begin()
        clients = self._clients
        going_on = True
        for fd, event in events:
            client = clients.get(fd)  # none: dropped earlier in this turn
            if client is not None:
                self._serve(client, event)
            elif fd in self._doors:
                self._accept(fd)
            elif fd == self._stop:
                going_on = False
        if self._journal:
            self._commit(self._journal)
        return going_on

    def _close_all(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._epoll.close()
        os.close(self._stop)
        if self._journal:
            self._journal.close()
        self._close_doors()

    def _close_doors(self) -> None:
        self._doors.close()
        if self._address.path.startswith("/"):
            os.unlink(self._address.path)

    # Connections

    def _accept(self, fd: int) -> None:
        while self._has_room_for_a_stranger():
            try:
                sock = self._doors.accept(fd)
            except OSError:
                _log.error("the store has run out of file descriptors with %d clients", len(self._clients))
                self._doors.shut(self._epoll)
                return
            if sock is None:
                return
            client = _Client(sock, Handshake(Role.SERVER, self._key, STORE_PURPOSE), time.monotonic_ns())
            self._clients[client.fd] = client
            self._strangers[client] = None
            self._epoll.register(client.fd, _READABLE)
            self._set_timer(client, HANDSHAKE_NS)

    def _has_room_for_a_stranger(self) -> bool:
        """Return whether to accept one more; if not, newcomers stay in the queue of the socket for now."""
        if len(self._clients) >= MAX_CLIENTS:
            self._doors.shut(self._epoll)
            return False
        if len(self._strangers) < MAX_STRANGERS:
            return True
        oldest = next(iter(self._strangers))
        left_ns = oldest.since_ns + CROWDED_NS - time.monotonic_ns()
        if left_ns <= 0:
            self._drop(oldest)
            return True
        self._set_timer(oldest, left_ns)
        self._doors.shut(self._epoll)
        return False

    def _drop(self, client: _Client) -> None:
        del self._clients[client.fd]
        self._strangers.pop(client, None)
        client.timer = 0
        client.sock.close()  # epoll forgets it with that
        session = client.session
        if session.connection is client:
            session.connection = None
            self._gone.append(session)
        self._doors.open(self._epoll)

    def _see_off(self, session: Session) -> None:
        if session.connection is None:
            self._desk.leave(session, time.monotonic_ns())
            self._deliver_to_woken()

    def _serve(self, client: _Client, event: int) -> None:
        try:
            if event & _WRITABLE:
                self._flush(client)
            if event == _WRITABLE:
                return
            if client.handshake is not None:
                self._greet(client, client.handshake)
                return
            data = client.recv(READ_BYTES)
            if (
                not client.inbox
                and len(data) > LENGTH.size
                and _length_of(data)[0] + LENGTH.size == len(data)
            ):
                self._ask(client, data)
            else:
                self._read(client, data)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
        except ProtocolError as error:
            _log.warning("the store at %s turned a connection away: %s", self._address, error)
            self._drop(client)
        except Exception:  # ours, but not for the others to suffer
            _log.exception("the store at %s cannot serve a client", self._address)
            if client.fd in self._clients:
                self._drop(client)

    def _read(self, client: _Client, data: bytes) -> None:
        """Take a part of a request."""
        if not data:
            raise ConnectionResetError("hung up")
        inbox = client.inbox
        inbox += data
        if len(inbox) < LENGTH.size:
            return
        length = _length_of(inbox)[0] + LENGTH.size
        if length > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"a request of {length} bytes came where {FRAME_LIMIT_BYTES} are allowed")
        if len(inbox) > length:
            raise ProtocolError("a client of the store asks again before it has its answer")
        if len(inbox) == length:
            client.inbox = bytearray()
            self._ask(client, bytes(inbox))

    def _greet(self, client: _Client, handshake: Handshake) -> None:
        data = client.recv(handshake.wanted - len(client.inbox))
        if not data:
            raise ConnectionResetError("hung up")
        client.inbox += data
        if len(client.inbox) < handshake.wanted:
            return
        self._send(client, handshake.advance(bytes(client.inbox)))
        client.inbox = bytearray()
        if handshake.wanted:
            return
        client.handshake = None
        client.timer = 0
        del self._strangers[client]
        self._doors.open(self._epoll)
        session = self._desk.welcome(handshake.peer_label if any(handshake.peer_label) else b"")
        old, session.connection, client.session = session.connection, client, session
        if old is not None:  # its client has given it up before we saw that it is broken
            self._drop(old)

    def _ask(self, client: _Client, frame: bytes) -> None:
        if client.outbox:
            raise ProtocolError("a client of the store asks again before it has taken its answer")
        desk = self._desk
        reply = desk.ask(client.session, frame)
        if reply is None:
            parked = client.session.parked
            assert parked is not None
            self._set_timer(client, parked.timeout_ns)
        elif self._journal:
            self._answers.append((client, reply))
        else:
            try:
                sent = client.send(reply)
            except BlockingIOError:
                sent = 0
            if sent != len(reply):
                self._send_later(client, reply[sent:])
        if desk.woken and not self._journal:
            self._deliver_to_woken()

    def _deliver_to_woken(self) -> None:
        woken, self._desk.woken = self._desk.woken, []
        for client, reply in woken:
            self._deliver(client, reply)

    def _deliver(self, client: _Client, reply: bytes) -> None:
        if client is None or client.session.connection is not client:
            return  # dropped in the meantime
        client.timer = 0
        try:
            self._send(client, reply)
        except OSError:
            self._drop(client)

    def _send(self, client: _Client, data: bytes) -> None:
        if not data:
            return
        try:
            sent = client.send(data)
        except BlockingIOError:
            sent = 0
        if sent != len(data):
            self._send_later(client, data[sent:])

    def _send_later(self, client: _Client, data: bytes) -> None:
        client.outbox = data
        self._epoll.modify(client.fd, _READABLE | _WRITABLE)

    def _flush(self, client: _Client) -> None:
        sent = client.send(client.outbox)
        client.outbox = client.outbox[sent:]
        if not client.outbox:
            self._epoll.modify(client.fd, _READABLE)

    # The journal

    def _commit(self, journal: Journal) -> None:
        """Write what this turn has changed, then let the answers go; or refuse it all."""
        desk = self._desk
        answers, self._answers = self._answers, []
        record = desk.record()
        try:
            if record:
                if journal.doubtful:
                    raise OSError(errno.EIO, "it could not be written before and is being repaired")
                journal.write(record)
            desk.keep()
        except OSError as error:
            _log.error("the store at %s cannot write its journal: %s", self._address, error.strerror)
            reason = f"the store at {self._address} cannot write its journal, so it changes nothing: {error.strerror}"
            answers = []
            for client, reply in desk.refuse(reason):
                if reply is not None:
                    answers.append((client, reply))
                elif client is not None and client.timer == 0:  # else it broke in this very turn
                    self._set_timer(client, client.session.parked.timeout_ns)
        for client, reply in answers:
            self._deliver(client, reply)
        self._deliver_to_woken()

    def _repair(self) -> None:
        """Write the journal anew if it has grown, or if its end is not what it should be."""
        journal = self._journal
        assert journal
        if not (journal.overgrown or journal.doubtful) or time.monotonic_ns() < self._repair_at_ns:
            return
        try:
            journal.rewrite(self._desk.table, self._desk.remembered())
        except OSError as error:
            _log.warning("the store at %s cannot write its journal anew: %s", self._address, error.strerror)
            self._repair_at_ns = time.monotonic_ns() + REPAIR_NS

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
        if not self._timers:
            return None
        return min(LONGEST_SLEEP_S, max(0.0, (self._timers[0][0] - time.monotonic_ns()) / 1e9))

    def _expire(self) -> None:
        timers = self._timers
        if not timers:
            return
        now_ns = time.monotonic_ns()
        while timers and timers[0][0] <= now_ns:
            _, number, client = heapq.heappop(timers)
            if client.timer != number:
                continue
            if client.handshake:
                self._drop(client)
            else:
                self._deliver(client, self._desk.expire(client.session))


_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _let_all_go() -> None:
    for server in _servers:
        server._let_go()


os.register_at_fork(after_in_child=_let_all_go)
