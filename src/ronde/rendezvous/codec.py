"""The rendezvous' state, roster and messages as bytes: `ronde 3 ["JoinRequest", ...]`. Pure.

The number is that of the encoding: nodes of one job run one version. After it comes what `typed_json` writes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from ronde.errors import ProtocolError, VersionError
from ronde.rendezvous.membership import Node
from ronde.rendezvous.state import PART_NODES, Heartbeat, JobState, Message
from ronde.typed_json import TypedJson

__all__ = ["VERSION", "decode", "decode_roster", "decode_state", "encode", "encode_roster"]

VERSION = 3
PART_LIMIT_BYTES = 8 << 20  # when unpacked

Word = TypeVar("Word")

_WORDS: TypedJson[JobState | Heartbeat | Message] = TypedJson(
    JobState | Heartbeat | Message, "message of a rendezvous"
)
_NODES: TypedJson[tuple[Node, ...]] = TypedJson(tuple[Node, ...], "roster of a rendezvous")


def encode(word: JobState | Heartbeat | Message) -> bytes:
    """Return the message that says this."""
    return _with_version(_WORDS.encode(word))


def decode(data: bytes, *kinds: type[Word]) -> Word:
    """Return what the message says, which is one of these kinds. Raises ProtocolError or VersionError."""
    word = _WORDS.decode(_without_version(data))
    if not isinstance(word, kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ProtocolError(f"a {type(word).__name__} of a rendezvous where {wanted} is expected")
    return word


@lru_cache(maxsize=16)
def decode_state(data: bytes) -> JobState:
    """Return the state. Raises ProtocolError or VersionError."""
    return decode(data, JobState)


def encode_roster(nodes: Sequence[Node]) -> list[bytes]:
    """Return the parts in which the nodes are written, packed: hosts are much alike."""
    parts = range(0, max(len(nodes), 1), PART_NODES)
    return [_pack(tuple(nodes[first : first + PART_NODES])) for first in parts]


@lru_cache(maxsize=4)
def decode_roster(parts: tuple[bytes, ...]) -> tuple[Node, ...]:
    """Return the nodes, by group rank. Raises ProtocolError or VersionError."""
    nodes: list[Node] = []
    for part in parts:
        try:
            unpacked = zlib.decompressobj().decompress(part, PART_LIMIT_BYTES)
        except zlib.error:
            raise ProtocolError(f"this is no roster of a rendezvous: {part[:60]!r}") from None
        nodes += _NODES.decode(_without_version(unpacked))
    return tuple(nodes)


def _pack(nodes: tuple[Node, ...]) -> bytes:
    return zlib.compress(_with_version(_NODES.encode(nodes)), 1)


def _with_version(text: bytes) -> bytes:
    return b"ronde %d " % VERSION + text


def _without_version(data: bytes) -> bytes:
    name, _, rest = data.partition(b" ")
    version, _, text = rest.partition(b" ")
    if name != b"ronde" or not version.isdigit():
        raise ProtocolError(f"this is not of a rendezvous: {data[:60]!r}")
    if version != b"%d" % VERSION:
        raise VersionError(
            f"another node speaks version {version[:20].decode()} of the rendezvous, this one speaks {VERSION}"
        )
    return text
