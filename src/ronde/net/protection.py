"""The protection of a connection against alteration and reading: how much it needs, and its keys."""

from __future__ import annotations

import socket
from enum import IntEnum

from ronde.environment import environment
from ronde.values import PROTECTION

__all__ = ["SECRET", "ConnectionKeys", "Protection", "protection_of", "secrecy_is_wanted"]

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
