"""What keeps the bytes of a connection those of its two ends: how much of it is wanted, and with which keys."""

from __future__ import annotations

import socket
from enum import IntEnum

from ronde.environment import environment
from ronde.values import PROTECTION

__all__ = ["SECRET", "ConnectionKeys", "Protection", "protection_of", "secrecy_is_wanted"]

SECRET = "secret"  # the value of the setting `protection` that conceals everything
_VARIABLE = "RONDE_PROTECTION"


class Protection(IntEnum):
    """What a connection needs. The numbers travel in the handshake."""

    KERNEL = 0  # a Unix socket: nothing but the kernel is between its ends
    SEALED = 1  # messages carry tags
    SECRET = 2  # and are encrypted


class ConnectionKeys:
    """The keys of one connection, as one end has them; `conceals`: its messages are encrypted."""

    __slots__ = ("conceals", "incoming", "outgoing")

    def __init__(self, outgoing: bytes, incoming: bytes, conceals: bool) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self.conceals = conceals

    def parts(self) -> tuple[bytes, bytes, bool]:
        """Return what the native side takes: the key of what we send, that of what we receive, whether it conceals."""
        return self.outgoing, self.incoming, self.conceals

    def __repr__(self) -> str:
        return f"ConnectionKeys(conceals={self.conceals})"


def protection_of(sock: socket.socket, is_secret: bool) -> Protection:
    """Return what a connection over this socket needs."""
    if sock.family == socket.AF_UNIX:
        return Protection.KERNEL
    return Protection.SECRET if is_secret else Protection.SEALED


def secrecy_is_wanted() -> bool:
    """Return whether this process's environment asks for secrecy: for those who have no settings, as launchers."""
    text = environment().get(_VARIABLE, "").strip()
    return bool(text) and PROTECTION.read(text, f"{_VARIABLE}={text!r}") == SECRET
