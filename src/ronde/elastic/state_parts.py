"""What a state consists of: parts, each of which can be saved, restored, and sent to another process."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Part", "ReshardablePart"]


class Part(Protocol):
    """One part of a state, such as a model. It has a *copy*, in host memory, of what it was at the last `save`.

    `is_sharded`: each rank has another part of the whole, so that a lost rank takes its part with it. A part may have a
    further attribute `may_differ`: True if equal states may look different on different ranks, so that
    `State.compare_ranks` leaves the part out.
    """

    is_sharded: bool

    def save(self) -> None:
        """Copy the live state, over the last copy."""

    def restore(self) -> None:
        """Make the live state that of the copy. Does nothing without a copy."""

    def payload(self) -> object:
        """Return what a new process needs of the copy; pickle can copy it."""

    def load(self, payload: Any) -> None:
        """Take a payload as the copy, and as the live state."""


@runtime_checkable
class ReshardablePart(Protocol):
    """A sharded part that can take over the shards of another number of ranks."""

    def load_shards(self, payloads: list[object]) -> None:
        """Take this rank's share of all shards, in the order of the ranks that had them, as `load` does."""
