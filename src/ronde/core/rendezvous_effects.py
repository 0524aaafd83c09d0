"""What the machine of a node wants of its shell, and what the shell tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ronde.core.round import RendezvousEvent

__all__ = [
    "Compare",
    "Compared",
    "Effect",
    "Event",
    "Forget",
    "Hold",
    "Look",
    "Pop",
    "Popped",
    "Push",
    "Seen",
    "Set",
    "Stored",
    "Tell",
    "Tick",
    "Values",
    "Watch",
]

Values = Mapping[str, bytes | None]  # by key; None: it is not there

# What is to be done. Results of `Set`, `Compare` and `Look` come back as events, in order.


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold the key, for as long as this node lives."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Set:
    """Set these keys; comes to `Stored`."""

    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Push:
    """Put the value into the queue."""

    queue: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Compare:
    """Set the state if it is the expected one (b"": there is none); comes to `Compared`."""

    expected: bytes
    desired: bytes


@dataclass(frozen=True, slots=True)
class Look:
    """Find out which of the keys have other values than the known ones; comes to `Seen`."""

    known: Values


@dataclass(frozen=True, slots=True)
class Watch:
    """From now on watch these keys and no others; what changes comes as `Seen` with nothing asked."""

    known: Values


@dataclass(frozen=True, slots=True)
class Pop:
    """From now on take what comes into this queue and no other (None: nothing); comes as `Popped`."""

    queue: str | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove all keys and queues that begin so."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the agent."""

    event: RendezvousEvent


Effect = Hold | Set | Push | Compare | Look | Watch | Pop | Forget | Tell

# What happens


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys have been set: the store answers."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the keys that a `Look` asked for (empty: of those that are watched) these have other values."""

    asked: Values
    changed: Values


@dataclass(frozen=True, slots=True)
class Compared:
    """The state is this now."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Popped:
    """These came out of the queue."""

    queue: str
    values: tuple[bytes, ...]


Event = Tick | Stored | Seen | Compared | Popped
