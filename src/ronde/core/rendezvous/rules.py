"""The rules by which the nodes of a job meet, with their defaults. Pure."""

from __future__ import annotations

from ronde.light_dataclasses import dataclass

__all__ = ["Rules"]

SECOND = 10**9


@dataclass(frozen=True)
class Rules:
    """How this node takes part.

    `min_slots`: what all nodes of a round must have together. `spares`: so many nodes may wait for a place without
    limit. `places_are_given`: every node wishes for its group rank, and of two that wish for the same only one gets in
    (`static`). `rehost`: nodes that lose the store may meet at that of another node (`quorum`). `gives_way`:
    when no restart is left, a failure costs the job the node where it was, and not its life. `longest_end_ns`: how long
    the workers of a node may take to end.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    join_timeout_ns: int = 600 * SECOND
    last_call_ns: int = 30 * SECOND
    heartbeat_ns: int = 5 * SECOND
    missing_heartbeats: int = 3
    places_are_given: bool = False
    min_slots: int = 0
    rehost: bool = False
    gives_way: bool = False
    longest_end_ns: int = 0

    @property
    def silence_ns(self) -> int:
        """How long a node may be silent."""
        return self.missing_heartbeats * self.heartbeat_ns
