"""Serves a store over TCP or a Unix socket, in one separate thread.

The rules:
  1. Until a connection has proved that it knows the job key, it belongs to `net/authenticating_listener`.
  2. A client has one request at a time, and takes the answer before its next request. A request that must wait is
     parked (`request_handler`) until a change or its timer answers it; nothing polls.
  3. A client's error costs that client its connection, and other clients nothing.
  4. The server notices a broken connection at once, or within seconds if no packet reports it. The held keys of its
     client go; the last answer is kept, because the client may come back.
  5. One native call (cpp/binding/store_server.cc) receives and answers the frequent requests until Python must act.
     A turn takes requests from several clients and sends all answers at its end. Everything else, such as parts of
     requests, is received here.
  6. Over TCP every message is sealed (`net/authentication`). An altered message ends its connection, and nothing else.
  7. With a journal, the answers of a turn leave only when its changes are on the disk. If these cannot be written, the
     server undoes and refuses them, and the store goes on with its earlier content.
  8. Beside its address the server listens at a Unix socket, where a request costs half as much as through TCP. The name
     of the socket follows from the job key and the address to which the port is bound, so only the job can know it, and
     a client that finds it in its network namespace reaches the same store as through the port.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ronde._native import (
    add_connection,
    new_connections,
    read_request,
    remove_connection,
    send_answers,
    serve_requests,
    set_at_rest,
)
from ronde.errors import ProtocolError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, Endpoint, is_ours, listen, parse_address
from ronde.net.authenticating_listener import AuthenticatedConnection, Authenticator
from ronde.net.authentication import Handshake, Role, protection_of, secrecy_is_wanted
from ronde.net.descriptors import close_own, file_identity, is_own
from ronde.stores.journal import Journal, read_journal
from ronde.stores.request_handler import ClientSession, RequestHandler
from ronde.stores.wire import FRAME_LIMIT_BYTES, LENGTH

__all__ = ["MAX_CLIENTS", "STORE_PURPOSE", "StoreServer", "detect_loss", "shortcuts"]

STORE_PURPOSE = "store"

MAX_CLIENTS = 20_000
SILENCE_S = 6  # how long a connection may be without a sign of life
WILDCARDS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
MOST_IN_A_TURN = 16
LONGEST_SLEEP_MS = 3600 * 1000
READ_BYTES = 1 << 16
REPAIR_NS = 10**9  # the interval between attempts to rewrite a journal

_log = logging.getLogger(__name__)
_length_of = LENGTH.unpack_from
_Request = tuple[int, int, int, int, bytes, bytes]  # a descriptor, then wire.Request
_READABLE, _WRITABLE = select.EPOLLIN, select.EPOLLOUT


class _Client:
    """One client's connection."""

    __slots__ = ("fd", "inbox", "outbox", "session", "sock", "timer")

    def __init__(self, sock: socket.socket, session: ClientSession) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.session = session
        self.inbox = bytearray()  # the part of a request that has arrived
        self.outbox = b""
        self.timer = 0  # number of the timer that is set; 0: none


class StoreServer:
    """A store at `address` (`unix:...`, `tcp:host:port`; port 0: any free one) for clients with the job key.

    `journal`: a file with the content to begin with, to which the server writes every change before it answers. `seed`:
    a journal of another store with the content to begin with; the journal of this one must then be empty. `listener`: a
    socket that listens at the address already; the server takes it over. `is_secret`: encrypt connections, as clients
    may ask, too; None: as the environment asks. `give_up` gets a sentence, on the server's thread, when no client can
    connect any more. Raises UsageError if the address is taken or not this machine's, or a file cannot be used.
    """

    def __init__(
        self,
        address: str,
        key: JobKey,
        journal: Path | None = None,
        seed: Path | None = None,
        listener: socket.socket | None = None,
        is_secret: bool | None = None,
        give_up: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._handler = RequestHandler()
        listeners, self._address = listen_for_clients(parse_address(address), key, listener)
        self._key = key
        self._epoll = select.epoll()
        self._is_secret = secrecy_is_wanted() if is_secret is None else is_secret
        self._listeners = listeners
        name = f"the store at {self._address}"
        self._authenticator = Authenticator(
            *(listeners, name, self._greet, self._report_listener, self._epoll),
            give_up=lambda error: give_up(
                f"{name} accepts no more connections, and ranks cannot meet there: {error.strerror}; a container or "
                "sandbox may forbid the system call accept4"
            ),
        )
        try:
            self._journal = self._open_journal(journal, seed)
        except BaseException:
            self._close_listeners()
            self._epoll.close()
            raise
        self._answers: dict[int, bytes] = {}  # to send at the end of the turn, by descriptor
        self._clients: dict[int, _Client] = {}
        self._connections = new_connections()
        self._departed: list[ClientSession] = []
        self._timers: list[tuple[int, int, _Client]] = []
        self._timer_count = 0
        self._repair_at_ns = 0
        self._stop, self._stop_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop_identity = file_identity(self._stop)  # of both ends
        self._epoll.register(self._stop, select.EPOLLIN)
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="ronde-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address with its actual port."""
        return str(self._address)

    @property
    def last_refusal(self) -> str:
        """A description of the last connection that did not prove the job key, or ""."""
        return self._authenticator.refusals.summary

    def close(self) -> None:
        """Stop serving, close all connections, and free the address. A second call does nothing.

        It also does nothing if the program has closed the server's descriptors, because nothing can then stop the
        server's thread.
        """
        ends = self._stop, self._stop_writer
        if self._thread.is_alive() and all(is_own(end, self._stop_identity) for end in ends):
            os.write(self._stop_writer, b"\0")
            self._thread.join()

    def wait(self) -> None:
        """Return when the server has ended: closed, or failed."""
        self._thread.join()

    def _open_journal(self, path: Path | None, seed: Path | None) -> Journal | None:
        if not path and not seed:
            return None
        now_ns = time.monotonic_ns()
        handler = self._handler
        if seed:
            for session in read_journal(seed, handler.table)[0]:
                handler.restore_session(*session, now_ns)
        if not path:
            return None
        journal = Journal(path)
        try:
            if not seed:
                for session in journal.load(handler.table):
                    handler.restore_session(*session, now_ns)
            elif not journal.is_empty:
                raise UsageError(f"the journal {path} is not empty, but --seed needs a new one")
            else:
                journal.rewrite(handler.table, handler.remembered_sessions())
        except OSError as error:
            journal.close()
            raise UsageError(f"cannot write the journal {path}: {error.strerror}") from None
        except BaseException:
            journal.close()
            raise
        return journal

    def _close_inherited(self) -> None:
        """Close the descriptors that a forked child has inherited: it would keep the parent's connections open."""
        for client in self._clients.values():
            client.sock.close()
        self._authenticator.close_sockets()
        for listener in self._listeners:
            listener.close()
        self._epoll.close()
        if self._journal:
            self._journal.close()

    # The loop

    def _run(self) -> None:
        epoll = self._epoll.fileno()
        content = None if self._journal else self._handler.content
        going_on = True
        try:
            while going_on:
                # Half of the clients at most: while the server answers these, the others send requests.
                most = min(MOST_IN_A_TURN, len(self._clients) // 2)
                wake_ns = self._authenticator.wake_ns
                timeout_ms = self._ms_to_next_timer(wake_ns) if self._timers or wake_ns is not None else -1
                going_on = self._serve_turn(
                    *serve_requests(epoll, timeout_ms, most, self._connections, content)
                )
        except BaseException:
            _log.exception("the store at %s has broken down", self._address)
            raise
        finally:
            self._close_all()

    def _serve_turn(
        self,
        requests: list[_Request],
        others: list[tuple[int, int, bytes | None]],
        unsent: dict[int, bytes | None],
    ) -> bool:
        """Serve all ready descriptors, and send the rest of answers; return whether to go on."""
        if self._journal:
            self._repair_journal()
            self._handler.begin_turn()
        self._keep_unsent(unsent)
        # Before a new connection can reuse a descriptor that is closed in this turn.
        self._answer_requests(requests)
        going_on = True
        for fd, event, data in others:
            client = self._clients.get(fd)  # None: dropped earlier in this turn
            if client is not None:
                self._serve_client(client, event, data)
            elif fd in self._authenticator:
                if newcomer := self._authenticator.handle_ready(fd):
                    self._add_client(newcomer)
            elif fd == self._stop:
                going_on = False
        if self._journal:
            self._commit_turn(self._journal)
        if self._timers:
            self._expire_timers()
        self._authenticator.tick(time.monotonic_ns())
        if self._handler.woken:
            self._deliver_to_woken()
        self._send_answers()
        while self._departed:
            self._end_session(self._departed.pop())
            self._send_answers()
        return going_on

    def _close_all(self) -> None:
        for client in list(self._clients.values()):
            self._drop_client(client)
        self._epoll.close()
        for end in (self._stop, self._stop_writer):
            close_own(end, self._stop_identity)
        if self._journal:
            self._journal.close()
        self._close_listeners()

    def _close_listeners(self) -> None:
        self._authenticator.close()
        for listener in self._listeners:
            listener.close()
        if self._address.path.startswith("/"):
            with suppress(FileNotFoundError):  # removed meanwhile
                os.unlink(self._address.path)

    # Connections

    def _greet(self, sock: socket.socket) -> Handshake:
        if sock.family != socket.AF_UNIX:
            detect_loss(sock)
        return Handshake(Role.SERVER, self._key, STORE_PURPOSE, protection_of(sock, self._is_secret))

    def _report_listener(self, error: OSError) -> None:
        _log.error(
            "the store at %s cannot accept connections and tries again: %s", self._address, error.strerror
        )

    def _add_client(self, newcomer: AuthenticatedConnection) -> None:
        """Serve an authenticated connection as a client from now on."""
        label = newcomer.handshake.peer_label
        session = self._handler.open_session(label if any(label) else b"")
        client = _Client(newcomer.sock, session)
        old, session.connection = session.connection, client
        self._clients[client.fd] = client
        keys = newcomer.handshake.keys
        add_connection(self._connections, client.fd, session, *(keys.parts() if keys else ()))
        if old is not None:  # the client has reconnected before the server noticed the break
            self._drop_client(old)
        if len(self._clients) >= MAX_CLIENTS:
            self._authenticator.pause_accepting()

    def _drop_client(self, client: _Client) -> None:
        del self._clients[client.fd]
        self._answers.pop(client.fd, None)
        remove_connection(self._connections, client.fd)
        client.timer = 0
        client.sock.close()  # this also removes it from the epoll
        session = client.session
        if session.connection is client:
            session.connection = None
            self._departed.append(session)
        self._authenticator.resume_accepting()

    def _end_session(self, session: ClientSession) -> None:
        if session.connection is None:
            self._handler.note_departure(session, time.monotonic_ns())
            self._deliver_to_woken()

    def _serve_client(self, client: _Client, event: int, data: bytes | None) -> None:
        """Serve a ready client that has not just sent one whole request; `data`: received already, if not None."""
        try:
            if event & _WRITABLE:
                self._flush_outbox(client)
            if event != _WRITABLE:
                self._receive(client, client.sock.recv(READ_BYTES) if data is None else data)
        except BlockingIOError:
            pass
        except Exception as error:
            self._fail_client(client, error)
        if client.fd in self._clients:
            set_at_rest(self._connections, client.fd, not (client.inbox or client.outbox))

    def _fail_client(self, client: _Client, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            _log.warning("the store at %s turned a connection away: %s", self._address, error)
        elif not isinstance(error, OSError):  # a bug, which must not end the server
            _log.error("the store at %s cannot serve a client", self._address, exc_info=error)
        if client.fd in self._clients:
            self._drop_client(client)

    def _receive(self, client: _Client, data: bytes) -> None:
        """Take a part of a request, and answer it when it is complete."""
        if not data:
            raise ConnectionResetError("hung up")
        inbox = client.inbox
        inbox += data
        if len(inbox) < LENGTH.size:
            return
        length = _length_of(inbox)[0] + LENGTH.size
        if length > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"a request of {length} bytes exceeds the limit of {FRAME_LIMIT_BYTES} bytes")
        if len(inbox) > length:
            raise ProtocolError("a client of the store asks again before it has its answer")
        if len(inbox) < length:
            return
        if client.outbox:
            raise ProtocolError("a client of the store asks again before it has taken its answer")
        client.inbox = bytearray()
        request = read_request(client.fd, bytes(inbox), self._connections)
        if request is None:
            raise ProtocolError("a request is malformed, or was altered, repeated or lost on its way")
        self._answer_requests([request])

    def _answer_requests(self, requests: list[_Request]) -> None:
        clients, answers, ask = self._clients, self._answers, self._handler.answer_request
        for fd, operation, number, timeout_ns, key, argument in requests:
            client = clients.get(fd)
            if client is None:
                continue  # dropped earlier in this turn
            try:
                reply = ask(client.session, operation, number, timeout_ns, key, argument)
            except Exception as error:
                self._fail_client(client, error)
                continue
            if reply is None:
                self._set_timer(client, timeout_ns)
            else:
                answers[fd] = reply

    def _deliver_to_woken(self) -> None:
        woken, self._handler.woken = self._handler.woken, []
        for client, reply in woken:
            self._deliver_answer(client, reply)

    def _deliver_answer(self, client: _Client | None, reply: bytes) -> None:
        """Queue an answer for the end of the turn."""
        if client is None or client.session.connection is not client:
            return  # dropped in the meantime
        client.timer = 0
        self._answers[client.fd] = reply

    def _send_answers(self) -> None:
        if not self._answers:
            return
        answers, self._answers = self._answers, {}
        self._keep_unsent(send_answers(answers, self._connections))

    def _keep_unsent(self, unsent: dict[int, bytes | None]) -> None:
        """Keep the rest of answers until they can be sent; None stands for a broken connection."""
        for fd, left in unsent.items():
            client = self._clients[fd]
            if left is None:
                self._drop_client(client)
                continue
            client.outbox = left
            set_at_rest(self._connections, fd, False)
            self._epoll.modify(fd, _READABLE | _WRITABLE)

    def _flush_outbox(self, client: _Client) -> None:
        sent = client.sock.send(client.outbox)
        client.outbox = client.outbox[sent:]
        if not client.outbox:
            self._epoll.modify(client.fd, _READABLE)

    # The journal

    def _commit_turn(self, journal: Journal) -> None:
        """Write the turn's changes to the journal, or refuse them all."""
        handler = self._handler
        record = handler.pack_turn()
        try:
            if record:
                if journal.is_doubtful:
                    raise OSError(errno.EIO, "it could not be written before and is being repaired")
                journal.write(record)
            handler.keep_turn()
        except OSError as error:
            _log.error("the store at %s cannot write its journal: %s", self._address, error.strerror)
            reason = f"the store at {self._address} cannot write its journal, so it changes nothing: {error.strerror}"
            self._answers.clear()
            for client, reply in handler.refuse_turn(reason):
                if reply is not None:
                    self._deliver_answer(client, reply)
                elif client is not None and client.timer == 0:  # else it broke in this turn
                    self._set_timer(client, client.session.parked.timeout_ns)

    def _repair_journal(self) -> None:
        """Rewrite the journal if it has grown, or if its end is doubtful."""
        journal = self._journal
        assert journal
        if not (journal.is_overgrown or journal.is_doubtful) or time.monotonic_ns() < self._repair_at_ns:
            return
        try:
            journal.rewrite(self._handler.table, self._handler.remembered_sessions())
        except OSError as error:
            _log.warning("the store at %s cannot write its journal anew: %s", self._address, error.strerror)
            self._repair_at_ns = time.monotonic_ns() + REPAIR_NS

    # Timers: a heap, whose entries are void once their client has another timer

    def _set_timer(self, client: _Client, after_ns: int) -> None:
        if len(self._timers) > 2 * len(self._clients) + 64:
            self._timers = [entry for entry in self._timers if entry[2].timer == entry[1]]
            heapq.heapify(self._timers)
        self._timer_count += 1
        client.timer = self._timer_count
        heapq.heappush(self._timers, (time.monotonic_ns() + after_ns, client.timer, client))

    def _ms_to_next_timer(self, wake_ns: int | None) -> int:
        """Return how long to wait, at most until `wake_ns`; -1: without limit."""
        while self._timers and self._timers[0][2].timer != self._timers[0][1]:
            heapq.heappop(self._timers)
        if self._timers and (wake_ns is None or self._timers[0][0] < wake_ns):
            wake_ns = self._timers[0][0]
        if wake_ns is None:
            return -1
        left_ns = wake_ns - time.monotonic_ns()
        return min(LONGEST_SLEEP_MS, max(0, -(-left_ns // 10**6)))

    def _expire_timers(self) -> None:
        timers = self._timers
        now_ns = time.monotonic_ns()
        while timers and timers[0][0] <= now_ns:
            _, number, client = heapq.heappop(timers)
            if client.timer == number:
                self._deliver_answer(client, self._handler.expire_request(client.session))


# The listeners


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


# Forked children

_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _close_all_inherited() -> None:
    for server in _servers:
        server._close_inherited()


os.register_at_fork(after_in_child=_close_all_inherited)
