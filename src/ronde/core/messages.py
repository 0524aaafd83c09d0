"""The messages between ranks and the coordinator, and their encoding as compact JSON.

To the coordinator: `Request`, `CallSite`, `JoinData` and `LeaveEngine`. From it, in the same order to every rank:
`Run`, `Evict`, `FailTensor`, `Joined`, `AllJoined`, `Tune`, `Leaving` and `Left`. A list of them is one JSON list, in
which each message is a list: its tag, then its fields in their order. The empty list is no bytes at all, because that
is what most ranks have to say in most rounds.

What arrives is checked field by field before it becomes a message. Whether the messages make sense together is for
`ronde.core.negotiation` to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

from ronde.errors import ProtocolError
from ronde.types import DType, Kind, ReduceOp

__all__ = [
    "AllJoined",
    "CallSite",
    "Evict",
    "FailTensor",
    "JoinData",
    "Joined",
    "LeaveEngine",
    "Leaving",
    "Left",
    "Message",
    "Request",
    "Run",
    "StreamItem",
    "TensorType",
    "Tune",
    "decode_requests",
    "decode_stream",
    "encode_requests",
    "encode_stream",
]


class TensorType(NamedTuple):
    """What one tensor of a group is."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The length of the first axis; an array without axes counts as one row."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Request:
    """A rank has submitted a tensor under this name, or a group of them.

    `shape` is that of the rank's own input, and `splits` how many rows of it go to each rank (alltoall; empty: equally
    many). `device` is a type of device without a number, such as "cpu". `more`: the other tensors of a group.
    """

    kind: Kind
    name: str
    dtype: DType
    shape: tuple[int, ...]
    op: ReduceOp = ReduceOp.Sum
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    splits: tuple[int, ...] = ()
    more: tuple[TensorType, ...] = ()

    @property
    def rows(self) -> int:
        """The length of the first axis; an array without axes counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def is_in_device_memory(self) -> bool:
        """Whether a backend takes it from the memory of its device."""
        return self.device.endswith(" memory")

    @property
    def tensors(self) -> tuple[TensorType, ...]:
        """All tensors of the group; of a single one, that."""
        return (TensorType(self.dtype, self.shape), *self.more)


@dataclass(frozen=True, slots=True)
class CallSite:
    """This line, such as "train.py:12", calls an operation without a name, whose request follows."""

    name: str
    site: str


@dataclass(frozen=True, slots=True)
class JoinData:
    """The rank has run out of data. Until all ranks have, it contributes neutral elements to what others submit."""


@dataclass(frozen=True, slots=True)
class LeaveEngine:
    """The rank submits nothing more."""


@dataclass(frozen=True, slots=True)
class Run:
    """All ranks have submitted this and agree: execute it, and keep the response in the cache's slot (-1: do not).

    `request` is the lowest rank's. `rows`: of allgather, how many rows each rank has, of a group tensor by tensor; of
    alltoall, how many go from each rank to each, as [source * size + destination]; otherwise empty. `absent`: ranks
    that have joined and not submitted it.
    """

    request: Request
    rows: tuple[int, ...]
    slot: int
    absent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """The cache's slot is free. Who had submitted its tensor as a hit must ask for it again."""

    slot: int


@dataclass(frozen=True, slots=True)
class FailTensor:
    """All ranks have submitted something under this name, but it does not fit together."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """These ranks have run out of data, the last one last: from here on they contribute neutral elements."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllJoined:
    """So have all now; `last` was the last one. From here on everybody submits again."""

    last: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """This rank submits nothing more: the next round is the last, for what all have submitted by now."""

    rank: int


@dataclass(frozen=True, slots=True)
class Left:
    """This rank has left. Nothing comes after it, ever."""

    rank: int


@dataclass(frozen=True, slots=True)
class Tune:
    """How batches are made and run from here on; the settings of these names say what each means."""

    fusion_bytes: int
    linger_ns: int
    batch_bytes: int
    largest_fused_bytes: int
    hierarchical_bytes: int
    doubling_bytes: int
    ring_bytes: int


Message = Request | CallSite | JoinData | LeaveEngine
StreamItem = Run | Evict | FailTensor | Joined | AllJoined | Tune | Leaving | Left


def encode_requests(messages: Sequence[Message]) -> bytes:
    """Return the bytes that `decode_requests` understands."""
    return _encode(messages)


def decode_requests(data: bytes) -> list[Message]:
    """Return what a rank has to say. Raises ProtocolError if it is malformed."""
    return cast("list[Message]", _decode(data, _REQUESTS))


def encode_stream(items: Sequence[StreamItem]) -> bytes:
    """Return the bytes that `decode_stream` understands."""
    return _encode(items)


def decode_stream(data: bytes) -> list[StreamItem]:
    """Return what the coordinator has decided. Raises ProtocolError if it is malformed."""
    return cast("list[StreamItem]", _decode(data, _STREAM))


# Fields as JSON has them. Python's bool is an int and its floats may look like one: types are compared exactly.


def _string(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not a string")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a 64-bit integer")
    return value


def _natural(value: Any) -> int:
    if _integer(value) < 0:
        raise ValueError(f"{value} is negative")
    return cast(int, value)


def _slot_or_none(value: Any) -> int:
    return -1 if value == -1 else _natural(value)


def _factor(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _tuple_of(each: Callable[[Any], int]) -> Callable[[Any], tuple[int, ...]]:
    def decode(value: Any) -> tuple[int, ...]:
        if type(value) is not list:
            raise ValueError(f"{value!r} is not a list")
        return tuple(map(each, value))

    return decode


def _kind(value: Any) -> Kind:
    return Kind(_integer(value))


def _dtype(value: Any) -> DType:
    return DType(_integer(value))


def _op(value: Any) -> ReduceOp:
    return ReduceOp(_integer(value))


def _tensor_types(value: Any) -> tuple[TensorType, ...]:
    if type(value) is not list or not all(type(each) is list and len(each) == 2 for each in value):
        raise ValueError(f"{str(value)[:80]!r} is not a list of types and shapes")
    return tuple(TensorType(_dtype(dtype), _tuple_of(_natural)(shape)) for dtype, shape in value)


def _request(value: Any) -> Request:
    return cast(Request, _message(value, {"submit": _FORMATS["submit"]}))


_Format = tuple[type, tuple[Callable[[Any], Any], ...]]

# By tag: the message and how to read its fields.
_FORMATS: dict[str, _Format] = {
    "submit": (
        Request,
        (
            *(_kind, _string, _dtype, _tuple_of(_natural), _op),
            *(_integer, _factor, _factor, _string, _tuple_of(_integer), _tensor_types),
        ),
    ),
    "call": (CallSite, (_string, _string)),
    "join": (JoinData, ()),
    "leave": (LeaveEngine, ()),
    "run": (Run, (_request, _tuple_of(_natural), _slot_or_none, _tuple_of(_natural))),
    "evict": (Evict, (_natural,)),
    "fail": (FailTensor, (_string, _string)),
    "joined": (Joined, (_tuple_of(_natural),)),
    "all joined": (AllJoined, (_natural,)),
    "tune": (Tune, (_natural,) * 7),
    "leaving": (Leaving, (_natural,)),
    "left": (Left, (_natural,)),
}
_REQUESTS = {tag: _FORMATS[tag] for tag in ("submit", "call", "join", "leave")}
_STREAM = {tag: format_ for tag, format_ in _FORMATS.items() if tag not in _REQUESTS}
_TAGS = {message: tag for tag, (message, _) in _FORMATS.items()}
_NAMES = {message: tuple(field.name for field in fields(message)) for message in _TAGS}


def _as_list(message: object) -> list[object]:
    return [_TAGS[type(message)], *(getattr(message, name) for name in _NAMES[type(message)])]


def _encode(messages: Sequence[object]) -> bytes:
    if not messages:
        return b""
    return json.dumps(list(messages), default=_as_list, separators=(",", ":")).encode()


def _decode(data: bytes, formats: dict[str, _Format]) -> list[object]:
    if not data:
        return []
    try:
        values = json.loads(data.decode())
        if type(values) is not list or not values:
            raise ValueError("not a list of messages")
        return [_message(value, formats) for value in values]
    except (ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"malformed message of the negotiation: {error}") from None


def _message(value: Any, formats: dict[str, _Format]) -> object:
    if type(value) is not list or not value or type(value[0]) is not str or value[0] not in formats:
        raise ValueError(f"{str(value)[:80]!r} is not one of {', '.join(formats)}")
    message, decoders = formats[value[0]]
    if len(value) - 1 != len(decoders):
        raise ValueError(f"{value[0]} has {len(value) - 1} fields instead of {len(decoders)}")
    return message(*(decode(field) for decode, field in zip(decoders, value[1:])))
