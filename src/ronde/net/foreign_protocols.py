"""Recognizes other protocols at the other end of a connection: that of torch.distributed's TCPStore.

Nodes of torchrun meet in such a store, so a node of torchrun and one of `ronde run` may reach each other at one
endpoint. A TCPStore does not answer Ronde's greeting, so this module asks in the protocol of the TCPStore.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from ronde.net.addresses import Endpoint

__all__ = ["describe_foreign_hello", "is_probe", "is_torch_store"]

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
