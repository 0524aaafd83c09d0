"""The user's configuration of the rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ronde.rendezvous.rules import Rules
from ronde.values import FLAG

__all__ = ["RendezvousConfig"]

SECOND = 10**9
# The fields of Rules that no backend decides.
_SHARED = (
    *(
        "min_nodes",
        "max_nodes",
        "spares",
        "join_timeout_ns",
        "first_join_timeout_ns",
        "last_call_ns",
        "heartbeat_ns",
        "missing_heartbeats",
    ),
    *("min_slots", "gives_way", "longest_end_ns"),
)


@dataclass(frozen=True)
class RendezvousConfig:
    """How the nodes of the job find each other.

    Attributes:
        backend: A name in the registry; "alone" (default) for one node without a store.
        endpoint: host:port, a path, or URLs, depending on the backend.
        run_id: The name of the job.
        min_nodes: The least number of nodes of a round (1).
        max_nodes: The greatest number of nodes of a round (1).
        node_rank: The given group rank of this node; -1 (default): none.
        spares: How many nodes may wait for a place without limit (0).
        join_timeout_ns: How long other nodes wait for a place, in nanoseconds (600 s).
        first_join_timeout_ns: The same before their first round (0: `join_timeout_ns`).
        last_call_ns: How long a round with the minimum of nodes waits for more, in nanoseconds (30 s).
        heartbeat_ns: The interval between heartbeats, in nanoseconds (5 s).
        missing_heartbeats: After how many missing heartbeats a node is lost (3).
        exit_barrier_ns: How long a node that has succeeded waits for the others, in nanoseconds (300 s).
        start_timeout_ns: How long to wait for the store, in nanoseconds (300 s).
        options: --rdzv-conf, as given.
        min_slots: The least number of slots that the nodes of a round have together (0).
        supply: The number of nodes that will ever exist; None (default) if others may take the place of lost ones.
        gives_way: When no restart is left, a failed worker takes its node out of the job and does not end the job
            (false).
        longest_end_ns: How long the workers of a node may take to end, in nanoseconds (0).
    """

    backend: str = "alone"
    endpoint: str = ""
    run_id: str = ""
    min_nodes: int = Rules.min_nodes
    max_nodes: int = Rules.max_nodes
    node_rank: int = -1
    spares: int = Rules.spares
    join_timeout_ns: int = Rules.join_timeout_ns
    first_join_timeout_ns: int = Rules.first_join_timeout_ns
    last_call_ns: int = Rules.last_call_ns
    heartbeat_ns: int = Rules.heartbeat_ns
    missing_heartbeats: int = Rules.missing_heartbeats
    exit_barrier_ns: int = 300 * SECOND
    start_timeout_ns: int = 300 * SECOND
    options: Mapping[str, str] = field(default_factory=dict)
    min_slots: int = Rules.min_slots
    supply: int | None = None
    gives_way: bool = Rules.gives_way
    longest_end_ns: int = 0

    def rules(self, **given: bool) -> Rules:
        """Return the parameters for the machines.

        Args:
            given: Those that the backend decides: `places_are_given` and `rehost`.

        Raises:
            Nothing.
        """
        return Rules(**{name: getattr(self, name) for name in _SHARED}, **given)

    @property
    def silence_ns(self) -> int:
        """After how much silence a node, or the store, counts as lost, in nanoseconds."""
        return self.rules().silence_ns

    def truth(self, option: str) -> bool | None:
        """Return the value of a yes-or-no option, None if it is not given.

        Args:
            option: Its name in `options`.

        Raises:
            UsageError: The value is neither yes nor no.
        """
        text = self.options.get(option)
        return None if text is None else bool(FLAG.read(text, f"--rdzv-conf {option}={text}"))
