"""Both ends of a new connection prove that they know the job key, before anything else is read or allocated.

    client -> server   hello: magic, version, label, nonce
    server -> client   hello, proof
    client -> server   proof

A proof is HMAC-SHA256 over (role, purpose, client's hello, server's hello) under the job key. Fresh nonces from both
sides make a recorded proof worthless, the role keeps a proof from being sent back to its maker, and the purpose keeps
a connection meant for one thing (the store, communicator 7) from being used for another. The label says who the sender
is, in 16 bytes that mean something to the caller; the proof covers it. All messages have fixed sizes.

This module does no input or output, except for `authenticate`, which drives one handshake over a blocking socket.
"""

from __future__ import annotations

import os
import socket
import struct
from enum import Enum

from ronde.errors import AuthenticationError, VersionError
from ronde.job_key import JobKey
from ronde.net.foreign import describe_foreign_hello
from ronde.net.frames import receive_exactly, send_all

__all__ = ["LABEL_BYTES", "PROTOCOL_VERSION", "Handshake", "Role", "authenticate"]

PROTOCOL_VERSION = 1
MAGIC = b"RNDE"
LABEL_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct(f"!4sH{LABEL_BYTES}s{NONCE_BYTES}s")


class Role(Enum):
    """Which end of the connection we are: the client opened it."""

    CLIENT = b"client"
    SERVER = b"server"


class Handshake:
    """One end of one handshake: send `greeting()`, then `advance()` with exactly `wanted` bytes until that is 0."""

    def __init__(self, role: Role, key: JobKey, purpose: str, label: bytes = b"") -> None:
        self._role = role
        self._key = key
        self._purpose = purpose.encode()
        label = label.ljust(LABEL_BYTES, b"\0")
        self._hello = _HELLO.pack(MAGIC, PROTOCOL_VERSION, label, os.urandom(NONCE_BYTES))
        self._peer_hello = b""
        self._peer_version = 0
        self.peer_label = b""
        self.wanted = _HELLO.size

    def greeting(self) -> bytes:
        """Return what to send before anything has come: a server says nothing to a stranger."""
        return self._hello if self._role is Role.CLIENT else b""

    def check_beginning(self, data: bytes) -> None:
        """Take fewer than `wanted` bytes, and forget them. Raises AuthenticationError if no hello begins like this."""
        if not self._peer_hello and data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise AuthenticationError(describe_foreign_hello(data))

    def advance(self, data: bytes) -> bytes:
        """Take exactly `wanted` bytes; return what to send, possibly nothing.

        Raises VersionError, or AuthenticationError if the other end does not know the key.
        """
        import hmac  # only now: it loads a large library, and a launcher should be up soon

        if not self._peer_hello:
            return self._take_hello(data)
        # A client hangs up on a server of another version. A server answers first, so that the client can say why.
        self._check_version()
        peer = Role.CLIENT if self._role is Role.SERVER else Role.SERVER
        if not hmac.compare_digest(data, self._proof(peer)):
            raise AuthenticationError(self._key.refusal())
        self.wanted = 0
        return self._proof(Role.CLIENT) if self._role is Role.CLIENT else b""

    def _take_hello(self, data: bytes) -> bytes:
        magic, self._peer_version, self.peer_label, _ = _HELLO.unpack(data)
        if magic != MAGIC:
            raise AuthenticationError(describe_foreign_hello(data))
        self._peer_hello = data
        self.wanted = PROOF_BYTES
        if self._role is Role.SERVER:
            return self._hello + self._proof(Role.SERVER)
        self._check_version()
        return b""

    def _check_version(self) -> None:
        if self._peer_version != PROTOCOL_VERSION:
            raise VersionError(
                f"the other end speaks version {self._peer_version} of Ronde's protocol, this one "
                f"{PROTOCOL_VERSION}; install the same Ronde everywhere"
            )

    def _proof(self, role: Role) -> bytes:
        hellos = (self._hello, self._peer_hello)
        client, server = hellos if self._role is Role.CLIENT else hellos[::-1]
        return self._key.hmac(role.value, self._purpose, client, server)


def authenticate(
    sock: socket.socket, role: Role, key: JobKey, purpose: str, deadline_ns: int | None, label: bytes = b""
) -> bytes:
    """Do a whole handshake over a socket; return the other end's label (16 bytes).

    Raises AuthenticationError, VersionError, builtins.TimeoutError at the deadline (of `time.monotonic_ns()`), or
    ConnectionError if the other end hangs up. Not a byte beyond the handshake is read.
    """
    handshake = Handshake(role, key, purpose, label)
    send_all(sock, handshake.greeting(), deadline_ns)
    while handshake.wanted:
        answer = handshake.advance(receive_exactly(sock, handshake.wanted, deadline_ns))
        send_all(sock, answer, deadline_ns)
    return handshake.peer_label
