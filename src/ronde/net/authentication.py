"""Both ends of a new connection prove that they know the job key, before anything else is read or allocated.

    client -> server   hello: magic, version, protection, label, nonce
    server -> client   hello, proof
    client -> server   proof
    server -> client   welcome

A proof is HMAC-SHA256 over (role, purpose, client's hello, server's hello) under the job key. Fresh nonces of both
sides make a recorded proof worthless, the role prevents sending a proof back to its maker, and the purpose prevents
using a connection for one thing (the store, communicator 7) as one for another. The label names the sender in 16 bytes
whose meaning the caller defines; the proof covers it. All messages have fixed sizes. Other protocols are recognized,
above all that of PyTorch's TCPStore, so that an error names them.

Separate keys (`Handshake.keys`), one for each direction, bind all later messages to the two ends: HKDF-SHA256
(RFC 5869) of the purpose and both hellos under the job key, so they are fresh for each connection. Each hello names the
protection that its sender needs, and the connection gets the stronger of both. A Unix socket needs none. A connection
that is a Unix socket at one end only passes through a third process, and is refused.

The client counts as authenticated only after the welcome: a server with a crowd of strangers may close the connection
before it reads the proof. A client that finds the server's proof wrong sends zeros for its proof, so that the server
logs the mismatch.

Only `authenticate` does input and output: it drives one handshake over a blocking socket.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, IntEnum

from ronde.environment import environment
from ronde.errors import AuthenticationError, ProtocolError, VersionError
from ronde.job_key import JobKey
from ronde.net.addresses import Endpoint
from ronde.values import PROTECTION

__all__ = [
    "LABEL_BYTES", "PROTOCOL_VERSION", "SECRET", "ConnectionKeys", "Handshake", "Protection", "Role",
    "authenticate", "describe_foreign_hello", "is_probe", "is_torch_store",
    "protection_of", "receive_some", "secrecy_is_wanted", "send_all",
]  # fmt: skip

PROTOCOL_VERSION = 3
MAGIC = b"RNDE"
LABEL_BYTES = 16
NONCE_BYTES = 31
PROOF_BYTES = 32
WELCOME = b"\1"
# In all versions of the same length, with the version in the same place, so that one can name the other.
_HELLO = struct.Struct(f"!4sHB{LABEL_BYTES}s{NONCE_BYTES}s")

SECRET = "secret"  # the value of the setting `protection` that encrypts everything
_VARIABLE = "RONDE_PROTECTION"


class Protection(IntEnum):
    """The protection that a connection needs. The numbers travel in the handshake."""

    KERNEL = 0  # a Unix socket: nothing but the kernel is between its ends
    SEALED = 1  # messages carry tags
    SECRET = 2  # and are encrypted


class ConnectionKeys:
    """The keys of one end of a connection. `conceals`: messages are encrypted."""

    __slots__ = ("conceals", "incoming", "outgoing")

    def __init__(self, outgoing: bytes, incoming: bytes, conceals: bool) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self.conceals = conceals

    def parts(self) -> tuple[bytes, bytes, bool]:
        """Return the arguments for the native side: the key for sending, the key for receiving, and `conceals`."""
        return self.outgoing, self.incoming, self.conceals

    def __repr__(self) -> str:
        return f"ConnectionKeys(conceals={self.conceals})"


def protection_of(sock: socket.socket, is_secret: bool) -> Protection:
    """Return the protection that a connection over this socket needs."""
    if sock.family == socket.AF_UNIX:
        return Protection.KERNEL
    return Protection.SECRET if is_secret else Protection.SEALED


def secrecy_is_wanted() -> bool:
    """Return whether the environment asks for encryption; for processes without settings, such as launchers."""
    text = environment().get(_VARIABLE, "").strip()
    return bool(text) and PROTECTION.read(text, f"{_VARIABLE}={text!r}") == SECRET


class Role(Enum):
    """The end of the connection; the client opened it."""

    CLIENT = b"client"
    SERVER = b"server"


class Handshake:
    """One end of one handshake: send `greeting()`, then `advance()` with exactly `wanted` bytes until that is 0.

    `protection`: what this end needs. `expects`: whether a server wants a peer with this label, which proves nothing
    yet. `keys`, after the handshake: those of the connection, None if it needs none.
    """

    def __init__(
        self,
        role: Role,
        key: JobKey,
        purpose: str,
        protection: Protection,
        label: bytes = b"",
        expects: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._expects = expects
        self._role = role
        self._key = key
        self._purpose = purpose.encode()
        self._protection = protection
        label = label.ljust(LABEL_BYTES, b"\0")
        self._hello = _HELLO.pack(MAGIC, PROTOCOL_VERSION, protection, label, os.urandom(NONCE_BYTES))
        self._peer_hello = b""
        self._peer_version = 0
        self._peer_protection = 0
        self.peer_label = b""
        self.keys: ConnectionKeys | None = None
        self._has_proved = False
        self.wanted = _HELLO.size

    def greeting(self) -> bytes:
        """Return what to send first; nothing for a server, which does not speak to a stranger."""
        return self._hello if self._role is Role.CLIENT else b""

    def check_beginning(self, data: bytes) -> None:
        """Check the first bytes of a message, without consuming them. Raises AuthenticationError if no hello fits."""
        if not self._peer_hello and data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise self._foreign(data)

    def advance(self, data: bytes) -> bytes:
        """Take exactly `wanted` bytes; return what to send, possibly nothing.

        Raises VersionError, AuthenticationError if the other end does not know the key, or ConnectionResetError if its
        label is not expected.
        """
        if not self._peer_hello:
            return self._take_hello(data)
        if self._has_proved:
            return self._take_welcome(data)
        # A client hangs up on a server of another version. A server answers first, so that the client can say why.
        self._check_version()
        peer = Role.CLIENT if self._role is Role.SERVER else Role.SERVER
        if not hmac.compare_digest(data, self._proof(peer)):
            raise AuthenticationError(self._key.refusal())
        self.keys = self._derive_keys()
        if self._role is Role.SERVER:
            self.wanted = 0
            return WELCOME
        self._has_proved = True
        self.wanted = len(WELCOME)
        return self._proof(Role.CLIENT)

    def farewell(self) -> bytes:
        """Return what to send after an error of `advance`, before closing the connection."""
        return bytes(PROOF_BYTES) if self._role is Role.CLIENT and self._peer_hello else b""

    def _take_hello(self, data: bytes) -> bytes:
        magic, self._peer_version, self._peer_protection, self.peer_label, _ = _HELLO.unpack(data)
        if magic != MAGIC:
            raise self._foreign(data)
        if self._expects is not None and not self._expects(self.peer_label):
            raise ConnectionResetError("it has another label than expected")
        self._peer_hello = data
        self.wanted = PROOF_BYTES
        if self._role is Role.SERVER:
            return self._hello + self._proof(Role.SERVER)
        self._check_version()
        return b""

    def _foreign(self, data: bytes) -> AuthenticationError:
        if self._role is Role.SERVER:
            return AuthenticationError(describe_foreign_hello(data))
        return AuthenticationError(
            "the other end does not speak Ronde's protocol: an incompatible server answers at this address"
        )

    def _take_welcome(self, data: bytes) -> bytes:
        if data != WELCOME:
            raise AuthenticationError(
                "the other end rejects this process's proof of the job key (RONDE_JOB_KEY)"
            )
        self.wanted = 0
        return b""

    def _check_version(self) -> None:
        if self._peer_version != PROTOCOL_VERSION:
            raise VersionError(
                f"the other end speaks version {self._peer_version} of Ronde's protocol, this one "
                f"{PROTOCOL_VERSION}; install the same Ronde everywhere"
            )

    def _proof(self, role: Role) -> bytes:
        return self._key.hmac(role.value, self._purpose, *self._hellos())

    def _hellos(self) -> tuple[bytes, bytes]:
        """Return the client's hello and the server's."""
        is_client = self._role is Role.CLIENT
        return (self._hello, self._peer_hello) if is_client else (self._peer_hello, self._hello)

    def _derive_keys(self) -> ConnectionKeys | None:
        ours, theirs = self._protection, self._peer_protection
        if theirs not in tuple(Protection):
            known = ", ".join(f"{each} ({each.name.lower()})" for each in Protection)
            raise VersionError(
                f"the other end asks for protection {theirs}, and this one knows {known}; install the same Ronde "
                "everywhere"
            )
        if (ours is Protection.KERNEL) != (theirs == Protection.KERNEL):
            raise AuthenticationError(
                "this connection is a Unix socket at one end only, so another process relays it"
            )
        if ours is Protection.KERNEL:
            return None
        fresh = self._key.hmac(b"keys of a connection", self._purpose, *self._hellos())
        to_server = hmac.digest(fresh, b"client to server\x01", "sha256")
        to_client = hmac.digest(fresh, b"server to client\x01", "sha256")
        outgoing, incoming = (to_server, to_client) if self._role is Role.CLIENT else (to_client, to_server)
        return ConnectionKeys(outgoing, incoming, conceals=max(ours, theirs) == Protection.SECRET)


def authenticate(
    sock: socket.socket,
    role: Role,
    key: JobKey,
    purpose: str,
    protection: Protection,
    deadline_ns: int | None,
    label: bytes = b"",
) -> Handshake:
    """Do a whole handshake over a socket; return it, with the other end's label and the connection's keys.

    Reads no byte beyond the handshake. Raises AuthenticationError, VersionError, builtins.TimeoutError at the deadline
    (a value of `time.monotonic_ns()`; None: never), or ConnectionError if the other end closes the connection.
    """
    handshake = Handshake(role, key, purpose, protection, label)
    send_all(sock, handshake.greeting(), deadline_ns)
    while handshake.wanted:
        try:
            answer = handshake.advance(_receive(sock, handshake, deadline_ns))
        except ProtocolError:
            with suppress(OSError):
                send_all(sock, handshake.farewell(), deadline_ns)
            raise
        send_all(sock, answer, deadline_ns)
    return handshake


def _receive(sock: socket.socket, handshake: Handshake, deadline_ns: int | None) -> bytes:
    """Read the next message, and check it early: another service may send less, and then wait."""
    data = b""
    while len(data) < handshake.wanted:
        data += receive_some(sock, handshake.wanted - len(data), deadline_ns)
        handshake.check_beginning(data)
    return data


# Blocking calls that end at a deadline


def _set_deadline(sock: socket.socket, deadline_ns: int | None) -> None:
    """Let the next blocking call on the socket end at the deadline. Raises builtins.TimeoutError if it has passed."""
    if deadline_ns is None:
        sock.settimeout(None)
        return
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(left_ns / 1e9)


def send_all(sock: socket.socket, data: bytes, deadline_ns: int | None) -> None:
    """Write all bytes. Raises builtins.TimeoutError at the deadline, ConnectionError if the peer is gone."""
    _set_deadline(sock, deadline_ns)
    sock.sendall(data)


def receive_some(sock: socket.socket, most: int, deadline_ns: int | None) -> bytes:
    """Return between 1 and `most` bytes, as soon as any arrive.

    Raises builtins.TimeoutError at the deadline, ConnectionError at the end of the stream.
    """
    _set_deadline(sock, deadline_ns)
    data = sock.recv(most)
    if not data:
        raise ConnectionResetError("the connection was closed by the other end")
    return data


# Other protocols: PyTorch's TCPStore


_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # the first bytes of every client of a TCPStore
_PING = b"\x0d"
_NONCE = (
    b"ring"  # by which Ronde recognizes its own probe; a client of a TCPStore sends a number of its process
)
_PROBE = _VALIDATE + _PING + _NONCE


def describe_foreign_hello(data: bytes) -> str:
    """Return an error message for first bytes that are not Ronde's hello."""
    if data.startswith(_VALIDATE):
        return (
            "the other end is a client of torch.distributed's TCPStore, probably a node started by torchrun: "
            "start all nodes of the job with ronde run, or all with torchrun"
        )
    return "the other end does not speak Ronde's protocol"


def is_probe(data: bytes) -> bool:
    """Return whether these first bytes are the question of `is_torch_store`, from a client that had no answer here."""
    return data == _PROBE


def is_torch_store(endpoint: Endpoint, within_s: float) -> bool:
    """Return whether a TCPStore of torch.distributed answers there within `within_s`."""
    with suppress(OSError), socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(within_s)
        sock.connect(endpoint.sockaddr)
        sock.sendall(_PROBE)
        return sock.recv(len(_NONCE)) == _NONCE
    return False
