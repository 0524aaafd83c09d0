"""How the nodes of a job find each other, as the user wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ronde.errors import UsageError
from ronde.light_dataclasses import dataclass, field

if TYPE_CHECKING:
    from ronde.core.rendezvous.state import Rules

__all__ = ["RendezvousConfig", "truth"]

SECOND = 10**9
_TRUTHS = {"1": True, "true": True, "t": True, "yes": True, "y": True}
_TRUTHS |= {"0": False, "false": False, "f": False, "no": False, "n": False}


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
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = -1
    spares: int = 0
    join_timeout_ns: int = 600 * SECOND
    last_call_ns: int = 30 * SECOND
    heartbeat_ns: int = 5 * SECOND
    missing_beats: int = 3
    exit_barrier_ns: int = 300 * SECOND
    start_timeout_ns: int = 300 * SECOND
    options: Mapping[str, str] = field(default_factory=dict)
    min_slots: int = 0
    supply: int | None = None
    gives_way: bool = False
    longest_end_ns: int = 0

    def rules(self, places_are_given: bool = False, rehost: bool = False) -> Rules:
        """Return what of this the machines need."""
        from ronde.core.rendezvous.state import Rules  # a job of one node does without

        return Rules(
            self.min_nodes,
            self.max_nodes,
            self.spares,
            self.join_timeout_ns,
            self.last_call_ns,
            self.heartbeat_ns,
            self.missing_beats,
            places_are_given,
            self.min_slots,
            rehost,
            self.gives_way,
            self.longest_end_ns,
        )

    def truth(self, option: str) -> bool | None:
        """Return what the option says, None if it is not given. Raises UsageError if it is neither yes nor no."""
        text = self.options.get(option)
        if text is None:
            return None
        try:
            return truth(text)
        except ValueError:
            raise UsageError(f"--rdzv-conf {option}={text} is invalid: expected true or false") from None


def truth(text: str) -> bool:
    """Return what a text of a user's means. Raises ValueError if it is neither yes nor no."""
    if text.lower() not in _TRUTHS:
        raise ValueError(text)
    return _TRUTHS[text.lower()]
