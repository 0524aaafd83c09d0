"""A store that another process, or another thread of this one, serves over TCP or a Unix socket."""

from __future__ import annotations

import logging
import socket
import threading
import time

from ronde import errors
from ronde.errors import PeerLostError, ProtocolError, UsageError
from ronde.net.addresses import Endpoint, parse, resolve
from ronde.net.authentication import Role, authenticate
from ronde.net.frames import frame, receive_frame, send_all
from ronde.net.stores.base import check_key, check_value, waited_in_vain
from ronde.net.stores.server import HANDSHAKE_NS, STORE_PURPOSE, StoreServer
from ronde.net.stores.wire import FRAME_LIMIT_BYTES, MAX_TIMEOUT_NS, Operation, Request, Status, parse_answer
from ronde.settings import JobKey

__all__ = ["StoreClient", "StoreServer"]

ANSWER_NS = 60 * 10**9  # how long the server may take, beyond the time that a request waits for its key
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.2

_log = logging.getLogger(__name__)


class StoreClient:
    """The `Store` served at `address`; tries to connect until `timeout_ns`, because its server may not be up yet.

    Raises TimeoutError with the last reason, AuthenticationError or VersionError at once.
    """

    def __init__(self, address: str, key: JobKey, timeout_ns: int) -> None:
        self._target = parse(address)
        self._lock = threading.Lock()
        self._sock: socket.socket | None = self._connect(key, timeout_ns)

    @property
    def address(self) -> str:
        return str(self._target)

    def set(self, key: str, value: bytes) -> None:
        self._ask(Request(Operation.SET, check_key(key), check_value(key, value)))

    def get(self, key: str, timeout_ns: int) -> bytes:
        status, value = self._ask(Request(Operation.GET, check_key(key), timeout_ns=timeout_ns))
        if status is Status.ABSENT:
            raise waited_in_vain(key, self.address, timeout_ns)
        return value

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        deadline_ns = time.monotonic_ns() + timeout_ns
        for key in keys:
            left_ns = max(0, deadline_ns - time.monotonic_ns())
            status, _ = self._ask(Request(Operation.WAIT, check_key(key), timeout_ns=left_ns))
            if status is Status.ABSENT:
                raise waited_in_vain(key, self.address, timeout_ns)

    def add(self, key: str, amount: int) -> int:
        _, total = self._ask(Request(Operation.ADD, check_key(key), b"%d" % amount))
        return int(total)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        check_value(key, expected)
        _, value = self._ask(Request.compare_set(check_key(key), expected, check_value(key, desired)))
        return value

    def delete_key(self, key: str) -> bool:
        status, _ = self._ask(Request(Operation.DELETE, check_key(key)))
        return status is Status.OK

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._sock:
            self._sock.close()
            self._sock = None

    def _ask(self, request: Request) -> tuple[Status, bytes]:
        with self._lock:
            if not self._sock:
                raise UsageError(f"the connection to the store at {self.address} has been closed")
            patience_ns = min(request.timeout_ns, MAX_TIMEOUT_NS) + ANSWER_NS
            deadline_ns = time.monotonic_ns() + patience_ns
            answered = False
            try:
                send_all(self._sock, frame(request.encode()), deadline_ns)
                status, value = parse_answer(receive_frame(self._sock, FRAME_LIMIT_BYTES, deadline_ns))
                answered = True
            except OSError as error:
                raise PeerLostError(f"lost the store at {self.address}: {error}") from None
            finally:
                if not answered:  # the answer may still come: never take it for that to another request
                    self._hang_up()
        if status is Status.REFUSED:
            raise UsageError(value.decode())
        return status, value

    def _connect(self, key: JobKey, timeout_ns: int) -> socket.socket:
        """Try until it works. A server that is not there yet cannot be waited for, only asked again."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._try_all(key, deadline_ns)
            except ProtocolError as error:
                raise type(error)(f"the store at {self.address}: {error}") from None
            except OSError as error:
                reason = error.strerror or str(error)
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0:
                message = f"waited {timeout_ns / 1e9:g} s for the store at {self.address}: {reason}"
                raise errors.TimeoutError(message, operation="store", waited_ns=timeout_ns)
            if pause_s < LONGEST_PAUSE_S <= 2 * pause_s:
                _log.info("waiting for the store at %s: %s", self.address, reason)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _try_all(self, key: JobKey, deadline_ns: int) -> socket.socket:
        failure = OSError(f"nothing is known of {self._target.host}")
        for endpoint in resolve(self._target):
            try:
                return _open(endpoint, key, deadline_ns)
            except OSError as error:
                failure = error
        try:
            raise failure
        finally:
            del failure  # its traceback has this frame, and would keep alive what the callers' frames hold


def _open(endpoint: Endpoint, key: JobKey, deadline_ns: int) -> socket.socket:
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        attempt_ns = min(deadline_ns, time.monotonic_ns() + HANDSHAKE_NS)
        sock.settimeout(max(0.001, (attempt_ns - time.monotonic_ns()) / 1e9))
        sock.connect(endpoint.sockaddr)
        if endpoint.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        authenticate(sock, Role.CLIENT, key, STORE_PURPOSE, attempt_ns)
    except BaseException:
        sock.close()
        raise
    return sock
