"""The nodes that ask for a place in the next round, and the choice among them. Pure.

1. Survivors of the last round come first, then all other nodes in the order of their arrival.
2. If two nodes are given one group rank, the leader refuses the later one once both have lived for longer than the
   patience. Before that, the first node may be a previous start of the second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView

from ronde.rendezvous.membership import Node
from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import Refused

__all__ = ["Applicants"]


class Applicants:
    """Nodes without a place in a round, in the order of their arrival."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._nodes: dict[str, Node] = {}
        self._rivals: dict[str, int] = {}  # by node: since when its given rank is also that of another node

    @property
    def ids(self) -> KeysView[str]:
        """The ids of the applicants, in the order of their arrival."""
        return self._nodes.keys()

    @property
    def spares(self) -> tuple[str, ...]:
        """The ids of the applicants that may wait for a place without limit."""
        return tuple(self._nodes)[: self._rules.spares]

    def add_node(self, node: Node) -> None:
        """Add an applicant."""
        self._nodes[node.id] = node

    def remove_node(self, node: str) -> None:
        """Remove a node that has a place, or no longer asks for one."""
        self._nodes.pop(node, None)

    def fitting_nodes(self, taken: Collection[Node], survivors: Collection[str] = ()) -> list[Node]:
        """Return the applicants that fit beside the nodes that have `taken` a place; `survivors` come first."""
        ordered = sorted(self._nodes.values(), key=lambda node: node.id not in survivors)
        if not self._rules.places_are_given:
            return ordered[: self._places_left(taken)]
        places = {node.wish for node in taken}
        fitting = []
        for node in ordered:
            if node.wish not in places:
                places.add(node.wish)
                fitting.append(node)
        return fitting

    def count_fitting(self, taken: Collection[Node]) -> int:
        """Return how many applicants fit; cheap where places are not given, because every arrival asks."""
        if self._rules.places_are_given:
            return len(self.fitting_nodes(taken))
        return min(len(self._nodes), self._places_left(taken))

    def _places_left(self, taken: Collection[Node]) -> int:
        return max(self._rules.max_nodes - len(taken), 0)

    def reason_to_refuse(self, node: Node) -> str:
        """Return why this node can never get a place, or "" if it can."""
        if not self._rules.places_are_given or 0 <= node.wish < self._rules.max_nodes:
            return ""
        return f"its --node-rank {node.wish} is not within 0 to {self._rules.max_nodes - 1}"

    def refuse_rivals(self, now_ns: int, survivors: Iterable[Node], patience_ns: int) -> list[Refused]:
        """Remove nodes whose given rank has been another node's for longer than the patience, and return why."""
        refused: list[Refused] = []
        first: dict[int, Node] = {}
        for node in [*survivors, *self._nodes.values()] if self._rules.places_are_given else ():
            other = first.setdefault(node.wish, node)
            if other.id == node.id:
                self._rivals.pop(node.id, None)
            elif now_ns - self._rivals.setdefault(node.id, now_ns) > patience_ns:
                hosts = node.host if node.host == other.host else f"{other.host} and {node.host}"
                reason = f"two nodes have --node-rank {node.wish}, on {hosts}"
                del self._rivals[node.id], self._nodes[node.id]
                refused.append(Refused(node.id, reason))
        return refused
