"""A client of a store that may send invalid requests: over TCP with tags, from a second implementation of them."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable

from ronde.job_key import JobKey
from ronde.net.authentication import Role, authenticate, protection_of
from ronde.stores.server import STORE_PURPOSE

__all__ = ["Member", "packed_keys"]

LONG_S = 30.0
PRIME = 2**130 - 5
LIMB = 2**32


def _quarter_round(x: list[int], a: int, b: int, c: int, d: int) -> None:
    for one, other, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[one] = (x[one] + x[other]) % LIMB
        mixed = x[third] ^ x[one]
        x[third] = (mixed << bits | mixed >> (32 - bits)) % LIMB


def tag_of(key: bytes, number: int, message: bytes) -> bytes:
    """Return the tag of ChaCha20-Poly1305 (RFC 8439) for a message that travels readable."""
    state = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    state += [*struct.unpack("<8I", key), 0, *struct.unpack("<3I", struct.pack("<QI", number, 0))]
    x = list(state)
    for _ in range(10):
        for i in range(4):
            _quarter_round(x, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            _quarter_round(x, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    block = struct.pack("<16I", *((one + other) % LIMB for one, other in zip(x, state)))
    r = int.from_bytes(block[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    padded = message + bytes(-len(message) % 16) + struct.pack("<QQ", len(message), 0)
    total = 0
    for begin in range(0, len(padded), 16):
        total = (total + int.from_bytes(padded[begin : begin + 16], "little") + 2**128) * r % PRIME
    return ((total + int.from_bytes(block[16:32], "little")) % 2**128).to_bytes(16, "little")


class Member:
    """A connection to the store at `sock`'s other end that has proved to know the key."""

    def __init__(self, sock: socket.socket, key: JobKey) -> None:
        self.sock = sock
        self._sent = self._received = 0
        protection = protection_of(sock, False)
        deadline_ns = time.monotonic_ns() + round(LONG_S * 1e9)
        self._keys = authenticate(sock, Role.CLIENT, key, STORE_PURPOSE, protection, deadline_ns).keys

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def _read(self, length: int) -> bytes:
        self.sock.settimeout(LONG_S)
        data = b""
        while len(data) < length:
            more = self.sock.recv(length - len(data))
            if not more:
                raise ConnectionResetError("the store has closed the connection")
            data += more
        return data

    def sealed(self, words: bytes) -> bytes:
        """Return the bytes with their frames sealed; bytes that are not frames stay as they are."""
        if not self._keys:
            return words
        sealed = b""
        while len(words) >= 4:
            (length,) = struct.unpack_from("!I", words)
            if len(words) < 4 + length:
                break
            frame, words = struct.pack("!I", length + 16) + words[4 : 4 + length], words[4 + length :]
            self._sent += 1
            sealed += frame + tag_of(self._keys.outgoing, self._sent, frame)
        return sealed + words

    def send(self, words: bytes) -> None:
        self.sock.sendall(self.sealed(words))

    def receive(self, limit_bytes: int) -> bytes:
        """Return the next answer, whose tag fits."""
        (length,) = struct.unpack("!I", self._read(4))
        assert length <= limit_bytes + 16
        answer = self._read(length)
        if not self._keys:
            return answer
        self._received += 1
        text, tag = answer[:-16], answer[-16:]
        assert tag == tag_of(self._keys.incoming, self._received, struct.pack("!I", len(answer)) + text)
        return text


def packed_keys(keys: Iterable[bytes]) -> bytes:
    """Return a list of keys as in a request, which the native client packs."""
    return b"".join([len(key).to_bytes(2, "big") + key for key in keys])
