"""The messages between ranks and the coordinator, and their encoding as compact JSON. Pure.

To the coordinator: `Request`, `CallSite`, `JoinData` and `LeaveEngine`. From it, in the same order to every rank:
`Run`, `Evict`, `FailTensor`, `Joined`, `AllJoined`, `Tune`, `Leaving` and `Left`. They travel as `typed_json`
writes them, the empty list as no bytes at all, because most ranks send nothing in most rounds.

Each message is checked against its types. `ronde.engine.negotiation` checks whether messages fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

from ronde.errors import ProtocolError
from ronde.typed_json import Natural, TypedJson
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

MessageT = TypeVar("MessageT")


class TensorType(NamedTuple):
    """The type of one tensor of a group."""

    dtype: DType
    shape: tuple[Natural, ...]

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
    shape: tuple[Natural, ...]
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
    def is_uneven(self) -> bool:
        """Whether ranks may have different numbers of rows."""
        return self.kind is Kind.allgather or self.kind is Kind.alltoall

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
    rows: tuple[Natural, ...]
    slot: Annotated[int, range(-1, 1 << 63)]
    absent: tuple[Natural, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """The cache's slot is free. A rank whose hit on it is pending requests the tensor again."""

    slot: Natural


@dataclass(frozen=True, slots=True)
class FailTensor:
    """All ranks have submitted something under this name, but it does not fit together."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """These ranks have run out of data, the last one last: from here on they contribute neutral elements."""

    ranks: tuple[Natural, ...]


@dataclass(frozen=True, slots=True)
class AllJoined:
    """All ranks have joined, `last` as the last one. From here on they submit again."""

    last: Natural


@dataclass(frozen=True, slots=True)
class Leaving:
    """This rank submits nothing more: the next round is the last, for what all have submitted by now."""

    rank: Natural


@dataclass(frozen=True, slots=True)
class Left:
    """This rank has left. It is the last item of the stream."""

    rank: Natural


@dataclass(frozen=True, slots=True)
class Tune:
    """How batches are made and run from here on; the settings of these names say what each means."""

    fusion_bytes: Natural
    linger_ns: Natural
    batch_bytes: Natural
    largest_fused_bytes: Natural
    hierarchical_bytes: Natural
    doubling_bytes: Natural
    ring_bytes: Natural


Message = Request | CallSite | JoinData | LeaveEngine
StreamItem = Run | Evict | FailTensor | Joined | AllJoined | Tune | Leaving | Left


_REQUESTS: TypedJson[tuple[Message, ...]] = TypedJson(tuple[Message, ...], "message of the negotiation")
_STREAM: TypedJson[tuple[StreamItem, ...]] = TypedJson(tuple[StreamItem, ...], "message of the negotiation")


def encode_requests(messages: Sequence[Message]) -> bytes:
    """Return the bytes that `decode_requests` understands."""
    return _REQUESTS.encode(tuple(messages)) if messages else b""


def decode_requests(data: bytes) -> list[Message]:
    """Return the messages of a rank. Raises ProtocolError if it is malformed."""
    return _decode(_REQUESTS, data)


def encode_stream(items: Sequence[StreamItem]) -> bytes:
    """Return the bytes that `decode_stream` understands."""
    return _STREAM.encode(tuple(items)) if items else b""


def decode_stream(data: bytes) -> list[StreamItem]:
    """Return a part of the coordinator's stream. Raises ProtocolError if it is malformed."""
    return _decode(_STREAM, data)


def _decode(form: TypedJson[tuple[MessageT, ...]], data: bytes) -> list[MessageT]:
    if not data:
        return []
    messages = form.decode(data)
    if not messages:
        raise ProtocolError("malformed message of the negotiation: an empty list")
    return list(messages)
