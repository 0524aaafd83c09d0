"""How the nodes of a job find each other, as the user wants it."""

from __future__ import annotations

from collections.abc import Mapping

from ronde.core.rendezvous.rules import Rules
from ronde.light_dataclasses import dataclass, field
from ronde.values import FLAG

__all__ = ["RendezvousConfig"]

SECOND = 10**9
# The fields of Rules that are the user's to choose.
_SHARED = (
    *(
        "min_nodes",
        "max_nodes",
        "spares",
        "join_timeout_ns",
        "last_call_ns",
        "heartbeat_ns",
        "missing_heartbeats",
    ),
    *("min_slots", "gives_way"),
)


@dataclass(frozen=True)
class RendezvousConfig:
    """How the nodes of the job find each other.

    `backend`: a name in the registry; `alone` for one node without a store. `endpoint`: host:port, a path, or URLs, as
    the backend reads it. `options`: --rdzv-conf, as given. `node_rank`: this node's group rank where that is given.
    `min_slots`: of all nodes of a round together. `spares`: how many nodes may wait for a place without limit.
    `start_timeout_ns`: how long to wait for the store where they meet. `supply`: all the nodes that there will ever be,
    None if others may come in the place of lost ones. `gives_way`: when no restart is left, a worker that fails takes
    only its node out of the job. `longest_end_ns`: how long the workers of a node may take to end.
    """

    backend: str = "alone"
    endpoint: str = ""
    run_id: str = ""
    min_nodes: int = Rules.min_nodes
    max_nodes: int = Rules.max_nodes
    node_rank: int = -1
    spares: int = Rules.spares
    join_timeout_ns: int = Rules.join_timeout_ns
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
        """Return what the machines need of this, with what the backend decides (`given`)."""
        return Rules(**{name: getattr(self, name) for name in _SHARED}, **given)

    @property
    def silence_ns(self) -> int:
        """After how much silence a node, or the store, counts as lost."""
        return self.rules().silence_ns

    def truth(self, option: str) -> bool | None:
        """Return what the option says, None if it is not given. Raises UsageError if it is neither yes nor no."""
        text = self.options.get(option)
        return None if text is None else bool(FLAG.read(text, f"--rdzv-conf {option}={text}"))
