"""The parameters of a rendezvous, with their defaults. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rules"]

SECOND = 10**9


@dataclass(frozen=True)
class Rules:
    """The parameters by which a node takes part.

    `min_nodes`, `max_nodes`: the nodes of a round. `min_slots`: the least number of slots that they have together.
    `spares`: how many nodes may wait for a place without limit. `join_timeout_ns`: how long other nodes wait for one.
    `first_join_timeout_ns`: the same before their first round (0: `join_timeout_ns`). `last_call_ns`: how long a round
    with the minimum of nodes waits for more. `heartbeat_ns`: the interval between heartbeats; `missing_heartbeats`:
    after how many a node is lost. `places_are_given`: every node wishes for its group rank, and of two with the same
    wish one is refused (`static`). `rehost`: nodes that lose the store may meet at the store of another node
    (`quorum`). `gives_way`: when no restart is left, a failed worker takes its node out of the job and does not end the
    job. `longest_end_ns`: how long the workers of a node may take to end.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    join_timeout_ns: int = 600 * SECOND
    first_join_timeout_ns: int = 0
    last_call_ns: int = 30 * SECOND
    heartbeat_ns: int = 5 * SECOND
    missing_heartbeats: int = 3
    places_are_given: bool = False
    min_slots: int = 0
    rehost: bool = False
    gives_way: bool = False
    longest_end_ns: int = 0

    def patience_ns(self, is_first: bool) -> int:
        """How long a node waits for a round; `is_first`: it has been in none."""
        return self.first_join_timeout_ns if is_first and self.first_join_timeout_ns else self.join_timeout_ns

    @property
    def silence_ns(self) -> int:
        """After how much silence a node, or the store, counts as lost."""
        return self.missing_heartbeats * self.heartbeat_ns
