"""Requests to etcd through its JSON gateway, and streams of watched keys.

The gateway has been part of etcd since 3.4, and needs only Python's standard library. The libraries for etcd's native
protocol depend on gRPC and protocol buffers, whose versions conflict with those of frameworks in the same process.

After a failure a request is sent again, to another member of the cluster, so it may be carried out twice: callers send
requests for which this makes no difference.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ronde import errors
from ronde.errors import PeerLostError, UsageError
from ronde.net.addresses import Address, resolve

__all__ = ["Endpoints", "Gateway", "Refusal", "WatchStream", "parse_endpoints"]

ATTEMPT_NS = 5 * 10**9  # how long one member may take
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
READ_BYTES = 1 << 16
KEEPALIVE_IDLE_S, KEEPALIVE_COUNT = 5, 3  # an idle stream must notice that its member's host has vanished
# Cancelled, deadline exceeded, aborted, unavailable: try again, or another member.
TRANSIENT_CODES = {1, 4, 10, 14}
DEFAULT_PORT = 2379
CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # etcd may be starting or ending
NO_TLS = "if it speaks no TLS, write http:// before it, or --rdzv-conf protocol=http"
CERTIFICATES = (
    "the certificates (ca_file, certificate_file, key_file; in --rdzv-conf: ca_cert, ssl_cert, ssl_cert_key)"
)

Message = dict[str, Any]


class Refusal(Exception):
    """etcd's answer to an invalid request; `code`: gRPC's status code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Endpoints:
    """The addresses of the cluster's members, and the TLS context for connecting to them."""

    members: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return ",".join(_hostport(host, port) for host, port in self.members)

    def connect(self, member: int, timeout_s: float) -> socket.socket:
        """Return a connection. Raises OSError."""
        host, port = self.members[member % len(self.members)]
        failure = OSError(f"{host} has no address")
        for endpoint in resolve(Address(host=host, port=port), round(timeout_s * 1e9)):
            sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout_s)
                sock.connect(endpoint.sockaddr)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self.tls.wrap_socket(sock, server_hostname=host) if self.tls else sock
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def host(self, member: int) -> str:
        return _hostport(*self.members[member % len(self.members)])


def parse_endpoints(
    endpoints: str | Sequence[str], ca_file: str = "", certificate_file: str = "", key_file: str = ""
) -> Endpoints:
    """Return the endpoints of `host:port`, `http://...` or `https://...`; several are separated by commas.

    Raises UsageError.
    """
    texts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    members, schemes = [], set()
    for text in texts:
        url = urlsplit(text if "//" in text else f"//{text}", scheme="https" if ca_file else "http")
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if not host or url.scheme not in ("http", "https") or url.path.strip("/") or url.username is not None:
            raise UsageError(
                f"{text!r} is not an endpoint of etcd: write host:port, [ipv6]:port or https://host:port"
            )
        members.append((host, port or DEFAULT_PORT))
        schemes.add(url.scheme)
    if len(schemes) != 1:
        raise UsageError(f"the endpoints of etcd must all be http or all https, not {endpoints!r}")
    if schemes == {"http"}:
        return Endpoints(tuple(members), None)
    try:
        tls = ssl.create_default_context(cafile=ca_file or None)
        if certificate_file:
            tls.load_cert_chain(certificate_file, key_file or None)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (ca_file, certificate_file, key_file)))
        raise UsageError(f"cannot use the certificates in {files}: {error.strerror or error}") from None
    return Endpoints(tuple(members), tls)


class Gateway:
    """One connection, to any member of the cluster that answers. Not thread-safe."""

    def __init__(self, endpoints: Endpoints, patience_ns: int) -> None:
        self.endpoints = endpoints
        self.patience_ns = patience_ns  # how long to try until the store counts as lost
        self.member = random.randrange(len(endpoints.members))
        self.is_giving_up = threading.Event()  # set: try every member once only
        self._connection: http.client.HTTPConnection | None = None

    def post(
        self, path: str, request: Message, timeout_ns: int | None = None, at_first: bool = False
    ) -> Message:
        """Send the request; return etcd's answer.

        Raises Refusal, or PeerLostError if no answer arrives within `timeout_ns` (None: the patience). `at_first`: this
        is the first request, so if all members refuse TLS the configuration is wrong: raises UsageError.
        """
        body = json.dumps(request).encode()
        deadline_ns = time.monotonic_ns() + (self.patience_ns if timeout_ns is None else timeout_ns)
        pause_s = FIRST_PAUSE_S
        failures = refusals = 0
        while True:
            try:
                return self._attempt(path, body, deadline_ns)
            except (OSError, http.client.HTTPException) as error:
                reason = f"{self.endpoints.host(self.member)}: {getattr(error, 'strerror', None) or error}"
                refused = isinstance(error, ssl.SSLError) and not isinstance(error, CUT_OFF)
                refusals = refusals + 1 if refused else 0
                if at_first and refusals >= len(self.endpoints.members):
                    raise UsageError(_tls_remedy(reason)) from None
            self.hang_up()
            self.member += 1
            failures += 1
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            tried_all = failures > len(self.endpoints.members)
            if left_s <= 0 or (tried_all and self.is_giving_up.is_set()):
                raise PeerLostError(f"lost the store at etcd:{self.endpoints}: {reason}")
            if tried_all:
                self.is_giving_up.wait(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def wait_for_cluster(self, timeout_ns: int) -> None:
        """Wait until the cluster answers. Raises TimeoutError with the last reason, or UsageError if TLS is refused."""
        try:
            self.post("kv/range", {"key": "AA==", "keys_only": True}, timeout_ns, at_first=True)
        except PeerLostError as error:
            reason = str(error).partition(": ")[2]
            # A server without TLS closes or resets such a connection, or does not answer. Or etcd is starting.
            if self.endpoints.tls and any(word in reason for word in ("EOF", "handshake", "reset")):
                reason += f"; {NO_TLS}"
            message = f"waited {timeout_ns / 1e9:g} s for the store at etcd:{self.endpoints}: {reason}"
            raise errors.TimeoutError(message, operation="store", waited_ns=timeout_ns) from None

    def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection:
            self._connection.close()
            self._connection = None

    def _attempt(self, path: str, body: bytes, deadline_ns: int) -> Message:
        timeout_s = max(0.001, min(ATTEMPT_NS, deadline_ns - time.monotonic_ns()) / 1e9)
        done = False
        try:
            connection = self._connect(timeout_s)
            connection.request("POST", f"/v3/{path}", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = _parse_message(response.read(), self.endpoints.host(self.member))
            done = True
        finally:
            if not done:  # the answer may still arrive, and must not count for another request
                self.hang_up()
        if response.status == 200 and "error" not in answer:
            return answer
        raise _error_of(answer, response.status)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        # If etcd, or a proxy before it, has closed the last one.
        if not self._connection or not self._connection.sock:
            host, port = self.endpoints.members[self.member % len(self.endpoints.members)]
            self._connection = http.client.HTTPConnection(host, port)
            self._connection.sock = self.endpoints.connect(self.member, timeout_s)
        self._connection.sock.settimeout(timeout_s)
        return self._connection


class WatchStream:
    """A stream of changes to some keys from a revision on. `ranges`: (key, end) in base64; end "": a single key.

    Raises OSError if it breaks or cannot be opened; then the caller must read the keys again.
    """

    def __init__(self, gateway: Gateway, ranges: Sequence[tuple[str, str]], revision: int) -> None:
        self.ranges = frozenset(ranges)
        requests = []
        for key, end in ranges:
            create = {"key": key, "start_revision": str(revision)} | ({"range_end": end} if end else {})
            requests.append(json.dumps({"create_request": create}))
        body = "\n".join(requests).encode()
        # With HTTP/1.0 the answer is plain lines. hasleader: end the stream when the member loses the cluster's leader,
        # because it would receive no changes.
        head = (
            f"POST /v3/watch HTTP/1.0\r\nHost: {gateway.endpoints.host(gateway.member)}\r\n"
            f"Grpc-Metadata-hasleader: true\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._received = b""
        self._sock = gateway.endpoints.connect(gateway.member, ATTEMPT_NS / 1e9)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
            self._sock.sendall(head.encode() + body)
            status, _, _ = self._until(b"\r\n\r\n", time.monotonic_ns() + ATTEMPT_NS).partition(b"\r\n")
            if b" 200 " not in status:
                raise OSError(f"etcd answered {status.decode(errors='replace')!r} to a watch")
        except BaseException:
            self._sock.close()
            raise

    def wait(self, revision: int, deadline_ns: int) -> None:
        """Return when a key has changed after the revision, or at the deadline."""
        while True:
            try:
                line = self._until(b"\n", deadline_ns)
            except TimeoutError:
                return
            message = _parse_message(line, "the stream")
            result = message.get("result", {})
            if "error" in message or result.get("canceled"):
                raise OSError(
                    f"etcd ended a watch: {message.get('error') or result.get('cancel_reason', '')}"
                )
            if any(int(event["kv"]["mod_revision"]) > revision for event in result.get("events", ())):
                return

    def hang_up(self) -> None:
        """End the stream for a thread that waits in it."""
        with suppress(OSError):  # it has ended before
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _until(self, mark: bytes, deadline_ns: int) -> bytes:
        """Return the bytes before the mark. At the deadline raises TimeoutError, and keeps what was received."""
        looked = 0
        while (at := self._received.find(mark, looked)) < 0:
            looked = max(0, len(self._received) - len(mark))
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(min(left_s, 1e6))
            part = self._sock.recv(READ_BYTES)
            if not part:
                raise OSError("etcd hung up")
            self._received += part
        found, self._received = self._received[:at], self._received[at + len(mark) :]
        return found


def _parse_message(text: bytes, whose: str) -> Message:
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        if text.strip() in (b"Not Found", b"404 page not found"):
            raise UsageError(f"{whose} is not an etcd with the JSON gateway of version 3 (etcd 3.4 or later)")
        raise OSError(f"not an answer of etcd: {text[:80].decode(errors='replace')!r}")
    return message


def _error_of(answer: Message, status: int) -> Exception:
    error = answer.get("error", "")
    if isinstance(error, dict):  # the form of errors in streams
        answer, error = {"code": error.get("grpc_code", 0)}, error.get("message", "")
    code, message = int(answer.get("code", 0)), str(error)
    if "database space exceeded" in message:
        return PeerLostError(f"etcd is full: {message}; compact and defragment it, or raise its quota")
    if code in TRANSIENT_CODES or status in (502, 503, 504) or "too many requests" in message:
        return OSError(message)
    return Refusal(code, message)


def _tls_remedy(reason: str) -> str:
    if "WRONG_VERSION_NUMBER" in reason:
        return f"{reason}; {NO_TLS}"
    return f"etcd and this node do not trust each other: {reason}; check {CERTIFICATES}"


def _hostport(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
