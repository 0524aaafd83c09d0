"""Who wants to be in the next round, and who of them fits. Pure.

1. Survivors of the last round come first, then all others in the order in which they came.
2. Of two nodes with one given place, the later one is refused if both still live after the time of silence: before
   that, the first one may be what a restarted node was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView

from ronde.core.rendezvous.membership import Node
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import Refused

__all__ = ["Applicants"]


class Applicants:
    """The machine."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._nodes: dict[str, Node] = {}  # in order of arrival
        self._rivals: dict[str, int] = {}  # since when they want a place that another one has

    @property
    def ids(self) -> KeysView[str]:
        """Who wants in, in the order in which they came."""
        return self._nodes.keys()

    @property
    def spares(self) -> tuple[str, ...]:
        """Who waits without limit, if there is no place."""
        return tuple(self._nodes)[: self._rules.spares]

    def add_node(self, node: Node) -> None:
        """This node wants in."""
        self._nodes[node.id] = node

    def remove_node(self, node: str) -> None:
        """This one does not any more, or has a place."""
        self._nodes.pop(node, None)

    # Who fits

    def fitting_nodes(self, taken: Collection[Node], survivors: Collection[str] = ()) -> list[Node]:
        """Return those who find a place beside those who have `taken` one."""
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
        """Return how many these are; asked for with everybody who comes."""
        if self._rules.places_are_given:
            return len(self.fitting_nodes(taken))
        return min(len(self._nodes), self._places_left(taken))

    def _places_left(self, taken: Collection[Node]) -> int:
        return max(self._rules.max_nodes - len(taken), 0)

    # Who is refused

    def reason_to_refuse(self, node: Node) -> str:
        """Say why this node can never fit; empty if it can."""
        if not self._rules.places_are_given or 0 <= node.wish < self._rules.max_nodes:
            return ""
        return f"its --node-rank {node.wish} is not within 0 to {self._rules.max_nodes - 1}"

    def refuse_rivals(self, now_ns: int, survivors: Iterable[Node], patience_ns: int) -> list[Refused]:
        """Drop those who want the place of another one for longer than the patience, and return why."""
        refused: list[Refused] = []
        first: dict[int, Node] = {}
        for node in [*survivors, *self._nodes.values()] if self._rules.places_are_given else ():
            other = first.setdefault(node.wish, node)
            if other.id == node.id:
                self._rivals.pop(node.id, None)
            elif now_ns - self._rivals.setdefault(node.id, now_ns) > patience_ns:
                hosts = node.host if node.host == other.host else f"{other.host} and {node.host}"
                reason = f"two nodes say that they are --node-rank {node.wish}, on {hosts}"
                del self._rivals[node.id], self._nodes[node.id]
                refused.append(Refused(node.id, reason))
        return refused
