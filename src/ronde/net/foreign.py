"""Tells who is at the other end where Ronde's protocol is not spoken: torch.distributed's TCPStore, for example.

torchrun's nodes meet in such a store, so a node of torchrun's and one of `ronde run` may find each other at one
endpoint. A TCPStore does not answer a greeting that is not its own, or hangs up without a word, so we ask it in its own
language.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from ronde.net.addresses import Endpoint

__all__ = ["describe_foreign_hello", "is_torch_store"]

_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # how every client of a TCPStore begins
_PING = b"\x0d"
_NONCE = b"ring"


def describe_foreign_hello(data: bytes) -> str:
    """Return what is wrong with the first bytes that came where a hello of Ronde's should."""
    if data.startswith(_VALIDATE):
        return (
            "the other end is a client of torch.distributed's TCPStore, probably a node started by torchrun: "
            "start all nodes of the job with ronde run, or all with torchrun"
        )
    return "the other end does not speak Ronde's protocol"


def is_torch_store(endpoint: Endpoint, within_s: float) -> bool:
    """Return whether torch.distributed's TCPStore answers there."""
    with suppress(OSError), socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(within_s)
        sock.connect(endpoint.sockaddr)
        sock.sendall(_VALIDATE + _PING + _NONCE)
        return sock.recv(len(_NONCE)) == _NONCE
    return False
