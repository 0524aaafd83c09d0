"""The user's configuration of the rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from ronde.core.rendezvous.rules import Rules
from ronde.light_dataclasses import dataclass, field
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
        "last_call_ns",
        "heartbeat_ns",
        "missing_heartbeats",
    ),
    *("min_slots", "gives_way", "longest_end_ns"),
)


@dataclass(frozen=True)
class RendezvousConfig:
    """How the nodes of the job find each other. Fields without a description here are described in `Rules`.

    `backend`: a name in the registry; `alone` for one node without a store. `endpoint`: host:port, a path, or URLs,
    depending on the backend. `run_id`: the name of the job. `options`: --rdzv-conf, as given. `node_rank`: the given
    group rank of this node, -1 if none is given. `exit_barrier_ns`: how long a node that has succeeded waits for the
    others. `start_timeout_ns`: how long to wait for the store. `supply`: the number of nodes that will ever exist; None
    if others may take the place of lost ones.
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
        """Return the parameters for the machines; `given`: those that the backend decides."""
        return Rules(**{name: getattr(self, name) for name in _SHARED}, **given)

    @property
    def silence_ns(self) -> int:
        """After how much silence a node, or the store, counts as lost."""
        return self.rules().silence_ns

    def truth(self, option: str) -> bool | None:
        """Return the value of a yes-or-no option, None if it is not given. Raises UsageError if it is neither."""
        text = self.options.get(option)
        return None if text is None else bool(FLAG.read(text, f"--rdzv-conf {option}={text}"))
