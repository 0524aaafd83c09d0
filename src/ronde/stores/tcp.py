"""The client of a store that another process or thread serves over TCP or a Unix socket.

The rules of a client:
  1. It has one request at a time: one send and one receive, in one native call (cpp/stores/store_request.h).
  2. If the connection breaks, the client reconnects and repeats the request under its number, so that the server
     carries it out once. It does so until its patience ends.
  3. After reconnecting, it first holds its keys again.
  4. Over TCP every message is sealed (`net/authentication`). An altered message ends the connection; rule 2 applies.
  5. A forked child closes the connection at once: it would hide the death of its parent. In the child, the object is
     another client from then on.
  6. If the program has closed the connection's descriptor, `close` leaves a file that now has its number alone, and so
     does the end of a client that was not closed. Requests do not check this: they use the number.
"""

from __future__ import annotations

import builtins
import errno
import logging
import math
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ronde import errors
from ronde._native import StoreLine
from ronde.errors import PeerLostError, ProtocolError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Endpoint, parse_address, resolve
from ronde.net.authenticating_listener import HANDSHAKE_NS
from ronde.net.authentication import (
    LABEL_BYTES,
    Role,
    authenticate,
    is_torch_store,
    protection_of,
    secrecy_is_wanted,
)
from ronde.net.descriptors import OwnSocket
from ronde.net.unix_peers import check_user
from ronde.stores import wire
from ronde.stores.server import STORE_PURPOSE, detect_loss, shortcuts
from ronde.stores.store import check_amount, check_key, check_value, key_list, missing_keys_error, missing_of
from ronde.stores.wire import FRAME_LIMIT_BYTES, Status, StoreOperation

__all__ = ["PATIENCE_NS", "StoreClient"]

PATIENCE_NS = 10 * 10**9
ANSWER_NS = 60 * 10**9  # how often the kernel interrupts a wait, to check the time
FIRST_ANSWER_NS = 2 * 10**9  # after which to warn that another service may be there
SHORTCUT_NS = 10**9  # for a handshake on the shortcut, whose name another process may have taken
PROBE_AFTER_NS, PROBE_S = 10**9 // 2, 0.5
TORCH_ANSWERS = (
    "an incompatible server answers there, torch.distributed's TCPStore, probably of a node started by torchrun: start "
    "all nodes of the job with ronde run, or all with torchrun, or choose another port"
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.2
LONGEST_CHECK_S = 0.01  # between calls of `check`
NOTICES_S = (10, 60, 300)  # after which to warn that there is no store; a mute service is named sooner
_TIMEVAL = struct.Struct("@ll")

# Of the frequent operations: before Python 3.12 the access to a class's attribute is slow.
_SET, _GET, _WAIT = StoreOperation.SET, StoreOperation.GET, StoreOperation.WAIT

_log = logging.getLogger(__name__)


def _check_size(argument: bytes) -> bytes:
    if len(argument) > FRAME_LIMIT_BYTES // 2:
        raise UsageError(f"one call to a store has at most {FRAME_LIMIT_BYTES // 2} bytes of keys and values")
    return argument


class StoreClient(StoreLine):
    """The `Store` served at `address`; tries to connect for `timeout_ns`, because the server may still be starting.

    `address`: several, separated by commas, are places where the store may be served, at one of them at a time; the
    client tries them in turn. `patience_ns`: how long to try to reconnect after a break; then the call raises
    PeerLostError, and every later call does so at once. With 0 the first break is final. `is_secret`: encrypt the
    connection, as the server may ask, too; None: as the environment asks. `server`: what serves the
    store, for messages. `check`: called regularly while there is no connection; its exception ends the call.

    Raises TimeoutError with the last reason; AuthenticationError or VersionError at once. Any thread may call `close`;
    a thread that waits in a call then gets a UsageError.
    """

    def __init__(
        self,
        address: str,
        key: JobKey,
        timeout_ns: int,
        patience_ns: int = PATIENCE_NS,
        is_secret: bool | None = None,
        server: str = "",
        check: Callable[[], None] | None = None,
    ) -> None:
        self._server = server
        self._check = check
        self._targets = [parse_address(each) for each in address.split(",")]
        self._key = key
        self._patience_ns = patience_ns
        self._is_secret = secrecy_is_wanted() if is_secret is None else is_secret
        self._id = os.urandom(LABEL_BYTES)
        self._held: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._lost = ""
        self._opening: OwnSocket | None = None  # of the present or last attempt to connect
        self._sock: OwnSocket | None = None
        self._fd = -1
        _clients.add(self)
        self._use_socket(self._connect_until(time.monotonic_ns() + timeout_ns, timeout_ns))

    @property
    def address(self) -> str:
        return ",".join(map(str, self._targets))

    def fork(self) -> StoreClient:
        """Return another client of the same store, for another thread; the caller closes it."""
        if self._closed:
            raise UsageError(f"the connection to the store at {self.address} has been closed")
        timeout_ns = max(self._patience_ns, HANDSHAKE_NS)
        return StoreClient(self.address, self._key, timeout_ns, self._patience_ns, self._is_secret)

    def close(self) -> None:
        self._closed = True
        # Another thread may wait for an answer or a connection, or have taken the lock a moment ago in order to ask.
        pause_s = 0.0
        while not self._lock.acquire(timeout=pause_s):
            if (sock := self._sock or self._opening) and sock.is_own():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes it
            pause_s = FIRST_PAUSE_S
        try:
            if self._sock and self._sock.is_own():
                with suppress(OSError):  # it may have broken before
                    self._sock.send(self._sealed(wire.request(StoreOperation.BYE)), socket.MSG_DONTWAIT)
            self._hang_up()
        finally:
            self._lock.release()

    # The operations

    def set(self, key: str, value: bytes) -> None:
        self._ask(_SET, key, check_value(key, value), 0, True)

    def get(self, key: str, timeout_ns: int) -> bytes:
        value = self._ask(_GET, key, b"", timeout_ns, False)
        if value is None:
            raise missing_keys_error(key, self.address, timeout_ns)
        return value

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        if keys and self._ask(_WAIT, None, key_list(keys), timeout_ns, False) is None:
            raise missing_keys_error(missing_of(keys, self.check), self.address, timeout_ns)

    def add(self, key: str, amount: int) -> int:
        return self._add(key, amount)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._compare_set(key, check_value(key, expected), check_value(key, desired))

    def delete_key(self, key: str) -> bool:
        encoded = check_key(key)
        there = self._ask(StoreOperation.DELETE, key, b"", 0, True) is not None
        self._held.pop(encoded, None)
        return there

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(StoreOperation.CHECK, None, key_list(keys), 0, False) is not None

    def num_keys(self) -> int:
        return int(self._ask(StoreOperation.NUM_KEYS, None, b"", 0, False) or 0)

    def append(self, key: str, value: bytes) -> None:
        self._ask(StoreOperation.APPEND, key, check_value(key, value), 0, True)

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        if not keys:
            return []
        values = self._ask(StoreOperation.MULTI_GET, None, key_list(keys), timeout_ns, False)
        if values is None:
            raise missing_keys_error(missing_of(keys, self.check), self.address, timeout_ns)
        return wire.values_from(values)

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        pairs = {check_key(key): check_value(key, value) for key, value in values.items()}
        self._ask(StoreOperation.MULTI_SET, None, _check_size(wire.pack_pairs(pairs)), 0, True)

    def delete_prefix(self, prefix: str) -> int:
        start = check_key(prefix)
        count = int(self._ask(StoreOperation.DELETE_PREFIX, prefix, b"", 0, True) or 0)
        self._held = {key: value for key, value in self._held.items() if not key.startswith(start)}
        return count

    def queue_push(self, queue: str, value: bytes) -> None:
        self._ask(StoreOperation.PUSH, queue, check_value(queue, value), 0, True)

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        value = self._ask(StoreOperation.POP, queue, b"", timeout_ns, True)
        if value is None:
            raise missing_keys_error(queue, self.address, timeout_ns)
        return value

    def queue_len(self, queue: str) -> int:
        return int(self._ask(StoreOperation.QUEUE_LEN, queue, b"", 0, False) or 0)

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        pairs = {check_key(key): value for key, value in known.items()}
        changed = self._ask(
            StoreOperation.WATCH, None, _check_size(wire.pack_known(pairs)), timeout_ns, False
        )
        if changed is None:
            return {}
        return {key.decode(): value for key, value in wire.pairs_from(changed).items()}

    def hold(self, key: str, value: bytes) -> None:
        encoded, value = check_key(key), check_value(key, value)
        self._held[encoded] = value  # first, so that a reconnection holds it, too
        self._ask(StoreOperation.HOLD, key, value, 0, False)

    # Called by the native methods of StoreLine

    _check_amount = staticmethod(check_amount)
    _check_key = staticmethod(check_key)
    _check_size = staticmethod(_check_size)

    @staticmethod
    def _judge(status: int, value: bytes) -> bytes | None:
        """Return the value of an answer, None for ABSENT; raise the error of any other answer."""
        if status >= Status.REFUSED:
            raise (UsageError if status == Status.REFUSED else PeerLostError)(value.decode())
        return None if status == Status.ABSENT else value

    def _ask_again(
        self,
        operation: int,
        key: bytes,
        argument: bytes,
        timeout_ns: int,
        number: int,
        began_ns: int,
        error: OSError,
    ) -> bytes | None:
        """Return the answer to a request whose connection broke, after reconnecting; the caller has the lock."""
        reason = str(error) if self._sock else "it was given up by a fork or an interrupted call"
        give_up_ns = time.monotonic_ns() + self._patience_ns
        if self._patience_ns == 0 and not self._lost:
            self._lost = f"{reason}; {self._server}" if self._server else reason
        try:
            while True:
                self._hang_up()
                if self._closed:
                    raise UsageError(f"the connection to the store at {self.address} has been closed")
                if self._lost:
                    raise PeerLostError(f"lost the store at {self.address}: {self._lost}") from error
                is_attack = isinstance(error, OSError) and error.errno == errno.EBADMSG
                log = _log.warning if is_attack else _log.info
                log("lost the connection to the store at %s: %s", self.address, reason)
                try:
                    self._use_socket(self._connect_until(give_up_ns, self._patience_ns))
                    connected_ns = time.monotonic_ns()
                    for held in self._held.items():
                        self._ask_once(StoreOperation.HOLD, 0, 0, *held)
                    left_ns = max(0, began_ns + timeout_ns - connected_ns)
                    status, value = self._ask_once(operation, number, left_ns, key, argument)
                    break
                except errors.TimeoutError as failure:
                    self._lost = f"{reason}; {failure}"
                except OSError as failure:
                    error, reason = failure, str(failure)
                    now_ns = time.monotonic_ns()
                    # A shorter connection does not renew the patience.
                    if now_ns - connected_ns > self._patience_ns:
                        give_up_ns = now_ns + self._patience_ns
                    elif now_ns > give_up_ns:
                        self._lost = reason
                    time.sleep(FIRST_PAUSE_S)
        except BaseException:  # the answer may still arrive, and must not count for another request
            self._hang_up()
            raise
        return self._judge(status, value)

    # Connections

    def _reset_after_fork(self) -> None:
        """Become another client, in a forked child, whatever other threads of the parent were doing."""
        self._lock = threading.Lock()
        self._id = os.urandom(LABEL_BYTES)
        self._held = {}
        self._hang_up()

    def _use_socket(self, sock: OwnSocket) -> None:
        self._sock = sock
        self._fd = sock.fileno()

    def _hang_up(self) -> None:
        self._fd = -1
        if self._sock:
            self._sock.close()
            self._sock = None

    def _connect_until(self, deadline_ns: int, timeout_ns: int) -> OwnSocket:
        """Try to connect until it works: there is no way to wait for a server that does not listen yet."""
        pause_s = FIRST_PAUSE_S
        patience_ns = min(FIRST_ANSWER_NS, max(0, deadline_ns - time.monotonic_ns()) * 3 // 4)
        began_ns, has_warned = time.monotonic_ns(), False
        notices = iter(NOTICES_S)
        notice_s: float = next(notices)
        while True:
            try:
                return self._try_addresses(deadline_ns, patience_ns)
            except ProtocolError as error:
                raise type(error)(f"the store at {self.address}: {error}") from None
            except OSError as error:
                reason = error.strerror or str(error)
                is_mute = isinstance(error, _NoAnswerError)
                if self._server and not is_mute:
                    reason += f"; {self._server}"
            if self._check is not None:
                self._check()
                pause_s = min(pause_s, LONGEST_CHECK_S)
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0 or self._closed:
                message = f"waited {timeout_ns / 1e9:g} s for the store at {self.address}: {reason}"
                raise errors.TimeoutError(message, operation="store", waited_ns=timeout_ns)
            waited_s = (time.monotonic_ns() - began_ns) / 1e9
            if waited_s >= (FIRST_ANSWER_NS / 1e9 if is_mute and not has_warned else notice_s):
                _log.warning("waiting for the store at %s: %s", self.address, reason)
                has_warned = True
                while notice_s <= waited_s:
                    notice_s = next(notices, math.inf)
            elif pause_s < LONGEST_PAUSE_S <= 2 * pause_s:
                _log.info("waiting for the store at %s: %s", self.address, reason)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            patience_ns = HANDSHAKE_NS

    def _try_addresses(self, deadline_ns: int, patience_ns: int) -> OwnSocket:
        failure = OSError(f"nothing is known of {self.address}")
        for target in self._targets:
            try:
                endpoints = resolve(target, min(deadline_ns - time.monotonic_ns(), HANDSHAKE_NS))
            except OSError as error:
                failure = error
                continue
            for endpoint in endpoints:
                for shorter in shortcuts(endpoint, self._key):
                    left_ns = deadline_ns - time.monotonic_ns()
                    with suppress(OSError, ProtocolError):  # another process may have taken the name
                        return self._open_connection(shorter, deadline_ns, min(SHORTCUT_NS, left_ns // 4))
                try:
                    return self._open_connection(endpoint, deadline_ns, patience_ns)
                except OSError as error:
                    failure = error
        try:
            raise failure
        finally:
            del failure  # its traceback has this frame, and would keep alive what the callers' frames hold

    def _open_connection(self, endpoint: Endpoint, deadline_ns: int, patience_ns: int) -> OwnSocket:
        sock = self._opening = OwnSocket(endpoint.family, socket.SOCK_STREAM)
        try:
            attempt_ns = min(deadline_ns, time.monotonic_ns() + patience_ns)
            sock.settimeout(max(0.001, (attempt_ns - time.monotonic_ns()) / 1e9))
            sock.connect(endpoint.sockaddr)
            check_user(sock)
            if endpoint.family != socket.AF_UNIX:
                detect_loss(sock)
            self._authenticate(sock, endpoint, attempt_ns)
            # From now on the kernel limits the time, so that a request needs one system call to send, one to receive.
            sock.settimeout(None)
            limit = _TIMEVAL.pack(ANSWER_NS // 10**9, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except BaseException:
            sock.close()
            raise
        return sock

    def _authenticate(self, sock: socket.socket, endpoint: Endpoint, deadline_ns: int) -> None:
        """Do the handshake. Raises ProtocolError if another service is recognized at the other end."""
        began_ns = time.monotonic_ns()
        protection = protection_of(sock, self._is_secret)
        try:
            keys = authenticate(
                sock, Role.CLIENT, self._key, STORE_PURPOSE, protection, deadline_ns, self._id
            ).keys
        except (ConnectionResetError, BrokenPipeError):
            _refuse_torch(endpoint)
            raise _NoAnswerError(
                "it closed the connection at the greeting; is it a store of Ronde?"
            ) from None
        except builtins.TimeoutError:
            waited_ns = time.monotonic_ns() - began_ns
            if waited_ns >= PROBE_AFTER_NS:  # not sooner, to spare a busy store the extra load
                _refuse_torch(endpoint)
            reason = f"it has not answered the greeting for {waited_ns / 1e9:.2g} s; is it a store of Ronde?"
            raise _NoAnswerError(reason) from None
        self._use_keys(*(keys.parts() if keys else ()))


def _refuse_torch(endpoint: Endpoint) -> None:
    """Raise ProtocolError if a TCPStore of torch answers there."""
    if endpoint.family != socket.AF_UNIX and is_torch_store(endpoint, PROBE_S):
        raise ProtocolError(TORCH_ANSWERS)


class _NoAnswerError(OSError):
    """A service that accepts connections, and does not answer the handshake."""


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _reset_all_after_fork() -> None:
    for client in _clients:
        client._reset_after_fork()


os.register_at_fork(after_in_child=_reset_all_after_fork)
