"""What the machine of a node wants of its shell, and what the shell tells it. Pure.

These are tuples because making a dataclass takes a while, and `ronde run` waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ronde.core.rendezvous.membership import RendezvousEvent

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

Values = Mapping[str, bytes | None]  # by key; None: it is not there

# What is to be done. Results of `Set`, `Compare` and `FindChanges` come back as events, in order.


class Hold(NamedTuple):
    """Hold the key, for as long as this node lives."""

    key: str
    value: bytes


class Set(NamedTuple):
    """Set these keys; comes to `Stored` with the same."""

    values: Mapping[str, bytes]


class Push(NamedTuple):
    """Put the value into the queue."""

    queue: str
    value: bytes


class Compare(NamedTuple):
    """Set the state if it is the expected one (b"": there is none); comes to `Compared`."""

    expected: bytes
    desired: bytes


class FindChanges(NamedTuple):
    """Find out which of the keys have other values than the known ones; comes to `Changes`."""

    known: Values


class Watch(NamedTuple):
    """From now on watch these keys and no others; what changes comes as `Changes` with nothing asked."""

    known: Values


class Pop(NamedTuple):
    """From now on take what comes into this queue and no other (None: nothing); comes as `Popped`."""

    queue: str | None


class Forget(NamedTuple):
    """Remove all keys and queues that begin so."""

    prefix: str


class Probe(NamedTuple):
    """Find out whether agents have ended for certain; comes to `Probed`. `addresses`: where they listen, by node.

    `all_or_none`: that only some of them have ended says nothing. `is_late`: they were lost before, so they may have
    taken part elsewhere since, and only their workers matter.
    """

    addresses: Mapping[str, str]
    all_or_none: bool = False
    is_late: bool = False


class Delete(NamedTuple):
    """Remove these keys."""

    keys: tuple[str, ...]


class NotifyAgent(NamedTuple):
    """Tell the agent."""

    event: RendezvousEvent


Effect = Hold | Set | Push | Compare | FindChanges | Watch | Pop | Forget | Delete | Probe | NotifyAgent

# What happens


class Tick(NamedTuple):
    """Time has passed."""


class Stored(NamedTuple):
    """These keys have been set."""

    values: Mapping[str, bytes]


class Changes(NamedTuple):
    """Of the keys that a `FindChanges` asked for (empty: of those that are watched) these have other values."""

    asked: Values
    changed: Values


class Compared(NamedTuple):
    """The state is this now."""

    value: bytes


class Popped(NamedTuple):
    """These came out of the queue."""

    queue: str
    values: tuple[bytes, ...]


class Probed(NamedTuple):
    """Of the agents at whose doors we have knocked these have ended; `is_late` as in `Probe`."""

    ended: tuple[str, ...]
    is_late: bool = False

    @staticmethod
    def of(asked: Probe, ended: tuple[str, ...]) -> Probed:
        """Return what is to be told when these have ended."""
        says_nothing = asked.all_or_none and len(ended) < len(asked.addresses)
        return Probed(() if says_nothing else ended, asked.is_late)


Event = Tick | Stored | Changes | Compared | Popped | Probed
