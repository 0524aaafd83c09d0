"""What a state consists of: parts, each of which can be saved, restored, and sent to another process."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Part", "ReshardablePart"]


class Part(Protocol):
    """A part of a state: a model, an optimizer, or the attributes of an object.

    `is_sharded`: whether each rank has another share of it. Otherwise it is the same on all ranks after each commit.
    """

    is_sharded: bool

    def save(self) -> None:
        """Copy the live state into host memory, which later calls use again."""

    def restore(self) -> None:
        """Make what the last `save` has copied the live state."""

    def payload(self) -> object:
        """Return the last copy, from which another process can `load`. It is valid until the next `save`."""

    def load(self, payload: object) -> None:
        """Take the payload of another process as the last copy, and as the live state."""


@runtime_checkable
class ReshardablePart(Protocol):
    """A sharded part that can take over the shards of another number of ranks."""

    def load_shards(self, payloads: list[object]) -> None:
        """Take this rank's share of all shards, in the order of the ranks that had them, as `load` does."""
