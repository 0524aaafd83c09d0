"""The effects that a node's machine asks of its shell, and the events that the shell reports. Pure.

The shell carries effects out in order. It answers `Set`, `Compare` and `FindChanges` by events in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ronde.rendezvous.membership import RendezvousEvent

__all__ = [
    "Compare",
    "Compared",
    "Delete",
    "Effect",
    "Event",
    "Forget",
    "Hold",
    "Probe",
    "Probed",
    "FindChanges",
    "Pop",
    "Popped",
    "Push",
    "Changes",
    "Set",
    "Stored",
    "NotifyAgent",
    "Tick",
    "Values",
    "Watch",
]

Values = Mapping[str, bytes | None]  # by key; None: the key is absent

# Effects


@dataclass(frozen=True)
class Hold:
    """Hold the key with this value until this node's connection ends."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Set:
    """Set these keys; answered by `Stored` with the same values."""

    values: Mapping[str, bytes]


@dataclass(frozen=True)
class Push:
    """Append the value to the queue."""

    queue: str
    value: bytes


@dataclass(frozen=True)
class Compare:
    """Replace the state if it equals `expected` (b"": there is none); answered by `Compared`."""

    expected: bytes
    desired: bytes


@dataclass(frozen=True)
class FindChanges:
    """Read which keys have other values than the known ones; answered by `Changes`."""

    known: Values


@dataclass(frozen=True)
class Watch:
    """Watch these keys instead of all earlier ones; every change arrives as `Changes` with an empty `asked`."""

    known: Values


@dataclass(frozen=True)
class Pop:
    """Take values from this queue instead of any earlier one (None: from no queue); they arrive as `Popped`."""

    queue: str | None


@dataclass(frozen=True)
class Forget:
    """Remove all keys and queues with this prefix."""

    prefix: str


@dataclass(frozen=True)
class Probe:
    """Find out which agents have certainly ended; answered by `Probed`.

    `addresses`: where the agents listen, by node. `all_or_none`: the answer counts only if all of them have ended.
    `is_late`: the nodes were lost earlier and may have taken part elsewhere since, so the answer concerns their workers
    only.
    """

    addresses: Mapping[str, str]
    all_or_none: bool = False
    is_late: bool = False


@dataclass(frozen=True)
class Delete:
    """Remove these keys."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class NotifyAgent:
    """Pass the event to the agent."""

    event: RendezvousEvent


Effect = Hold | Set | Push | Compare | FindChanges | Watch | Pop | Forget | Delete | Probe | NotifyAgent

# Events


@dataclass(frozen=True)
class Tick:
    """The time is `wake_ns` or later."""


@dataclass(frozen=True)
class Stored:
    """The store has set these keys."""

    values: Mapping[str, bytes]


@dataclass(frozen=True)
class Changes:
    """New values of keys: of those in `asked`, the known values of a `FindChanges`; if it is empty, of watched keys."""

    asked: Values
    changed: Values


@dataclass(frozen=True)
class Compared:
    """The state after a `Compare`: the desired value if the comparison succeeded."""

    value: bytes


@dataclass(frozen=True)
class Popped:
    """Values taken from the queue."""

    queue: str
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class Probed:
    """The probed agents that have ended; `is_late` as in `Probe`."""

    ended: tuple[str, ...]
    is_late: bool = False

    @staticmethod
    def of(asked: Probe, ended: tuple[str, ...]) -> Probed:
        """Return the answer to a `Probe` that found these agents ended."""
        is_inconclusive = asked.all_or_none and len(ended) < len(asked.addresses)
        return Probed(() if is_inconclusive else ended, asked.is_late)


Event = Tick | Stored | Changes | Compared | Popped | Probed
