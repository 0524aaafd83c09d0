"""The words of rendezvous as JSON: `{"ronde": 1, "Join": {...}}`. Typed, versioned, and checked when read. Pure.

A dataclass is an object with its name as the only key; fields go by name. What is read must have exactly the fields
that this version knows, of the right types: nodes of one job run one version.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

from ronde.core.rendezvous import membership, state
from ronde.core.rendezvous.membership import Node
from ronde.core.rendezvous.state import PART_NODES, JobPhase, JobState
from ronde.errors import ProtocolError, VersionError

__all__ = ["VERSION", "decode", "decode_roster", "decode_state", "encode", "encode_roster"]

VERSION = 1
PART_LIMIT_BYTES = 8 << 20  # when unpacked

Word = TypeVar("Word")
Reader = Callable[[Any], Any]


def encode(word: object) -> bytes:
    """Return the message that says this."""
    return json.dumps({"ronde": VERSION, **_plain(word)}, separators=(",", ":")).encode()


def decode(data: bytes, *kinds: type[Word]) -> Word:
    """Return what the message says, which is one of these kinds. Raises ProtocolError or VersionError."""
    try:
        found = json.loads(data)
        version = found.pop("ronde")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ProtocolError(f"this is no message of a rendezvous: {data[:60]!r}") from None
    if version != VERSION:
        raise VersionError(
            f"another node speaks version {version} of the rendezvous, this one speaks {VERSION}"
        )
    word: Word = _read_word(found, {kind.__name__ for kind in kinds})
    return word


@lru_cache(maxsize=16)
def decode_state(data: bytes) -> JobState:
    """Return the state. Raises ProtocolError or VersionError."""
    return decode(data, JobState)


def encode_roster(nodes: Sequence[Node]) -> list[bytes]:
    """Return the parts in which the nodes are written, packed: hosts are much alike."""
    parts = range(0, max(len(nodes), 1), PART_NODES)
    return [_pack([_plain(node)["Node"] for node in nodes[first : first + PART_NODES]]) for first in parts]


@lru_cache(maxsize=4)
def decode_roster(parts: tuple[bytes, ...]) -> tuple[Node, ...]:
    """Return the nodes, by group rank. Raises ProtocolError or VersionError."""
    nodes: list[Node] = []
    for part in parts:
        unpacker = zlib.decompressobj()
        try:
            version, listed = json.loads(unpacker.decompress(part, PART_LIMIT_BYTES))
        except (ValueError, TypeError, RecursionError, zlib.error):
            raise ProtocolError(f"this is no roster of a rendezvous: {part[:60]!r}") from None
        if version != VERSION:
            raise VersionError(f"another node speaks version {version}, this one speaks {VERSION}")
        nodes += [_read_fields(Node, each) for each in listed]
    return tuple(nodes)


def _pack(nodes: list[Any]) -> bytes:
    return zlib.compress(json.dumps([VERSION, nodes], separators=(",", ":")).encode(), 1)


def _plain(word: Any) -> Any:
    if is_dataclass(word):
        return {type(word).__name__: {name: _plain(getattr(word, name)) for name in _readers(type(word))}}
    if isinstance(word, tuple):
        return [_plain(each) for each in word]
    return word


# Reading: what stands behind a field's colon says how.


def _class(name: str) -> type[Any]:
    found: type[Any] = getattr(membership, name, None) or getattr(state, name)
    return found


_readers_of: dict[type[Any], dict[str, Reader]] = {}


def _readers(kind: type[Any]) -> dict[str, Reader]:
    """How to read each field."""
    if kind not in _readers_of:
        _readers_of[kind] = {field.name: _reader(str(field.type)) for field in fields(kind)}
    return _readers_of[kind]


def _reader(annotation: str) -> Reader:
    simple = {"int": int, "str": str, "bool": bool}
    if annotation in simple:
        wanted = simple[annotation]

        def read_simple(value: Any) -> Any:
            if type(value) is not wanted:
                raise ProtocolError(f"{value!r} is no {annotation}")
            return value

        return read_simple
    if annotation == "JobPhase":
        return _read_phase
    if annotation.startswith("tuple["):
        each = _reader(annotation[len("tuple[") : -len(", ...]")])

        def read_tuple(value: Any) -> Any:
            if not isinstance(value, list):
                raise ProtocolError(f"{value!r} is no list")
            return tuple(each(part) for part in value)

        return read_tuple
    names = set(annotation.split(" | "))
    return lambda value: None if value is None and "None" in names else _read_word(value, names)


def _read_phase(value: Any) -> JobPhase:
    try:
        return JobPhase(value)
    except ValueError:
        raise ProtocolError(f"{value!r} is no phase of a job") from None


def _read_word(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        ((name, content),) = value.items()
        if name in names:
            return _read_fields(_class(name), content)
    raise ProtocolError(f"this is none of {', '.join(sorted(names))}: {str(value)[:60]}")


def _read_fields(kind: type[Any], content: Any) -> Any:
    readers = _readers(kind)
    if not isinstance(content, dict) or not content.keys() <= readers.keys():
        raise ProtocolError(f"this is no {kind.__name__}: {str(content)[:60]}")
    if missing := readers.keys() - content.keys():
        raise ProtocolError(f"a {kind.__name__} without {', '.join(sorted(missing))}")
    return kind(**{name: readers[name](value) for name, value in content.items()})
