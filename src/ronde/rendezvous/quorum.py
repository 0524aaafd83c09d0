"""The quorum: which side of a partition may begin a round, so that one job never goes on twice. Pure.

A store that one of the nodes serves can be out of reach of some nodes only. Nodes that lose it meet at the store of
another node, and each side must decide alone that the other side does not go on as well.

1. The quorum decides about the beginning of a round only: nodes of a round that has begun work until it ends.
2. The nodes of the last round count, except those that have certainly ended while they were here: they left, or their
   machines reported their end when their connections broke. (A node that was silent before it ended may have taken part
   elsewhere; it is excepted, too, if such nodes are fewer than half.) At the store where the nodes met in that round,
   at least half of those that count must be present; at another store, more than half. Both conditions cannot hold,
   because no node is at two stores.
3. A node that moves takes its knowledge along: of two states the one of the later round counts, and the node asks for a
   round later than any in which it may have been given a place elsewhere. So a round that two stores might begin gets
   another number at one of them, whichever nodes they count.
4. A node that has asked for a place in a round, and lost the store without a sign, does not know whether it got one. It
   takes part elsewhere, but does not count.
5. No node returns to a store that it has left. If too few nodes come to the new one, it gives up.
6. Once more than half have moved, the nodes meet there. While a round goes on there, the nodes elsewhere are redirected
   to it. A redirected node forgets its state.
7. Where none of the last round's nodes is present, a round begins when the machines of all report that they have ended:
   none is left that could go on elsewhere, so newcomers may take over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from ronde.rendezvous.membership import Node, Rules

__all__ = ["Quorum", "count_missing"]


def count_missing(
    last: Collection[str], ended: Collection[str], here: Collection[str], has_moved: bool
) -> int:
    """Return how many more nodes of the last round must be here to be sure that the others cannot go on."""
    living = [node for node in last if node not in ended]
    needed = len(living) // 2 + 1 if has_moved else (len(living) + 1) // 2
    return max(needed - sum(node in here for node in living), 0) if living else 0


class Quorum:
    """A leader's knowledge of the last round's nodes. `present`: those that have shown that they are here."""

    def __init__(self, rules: Rules, last: Mapping[str, Node]) -> None:
        self.present: set[str] = set()
        self._rules = rules
        self._last = last
        self._ended: set[str] = set()  # certainly, so they are not elsewhere
        self._promised: set[str] = set()  # they may count elsewhere (rule 4)
        self._probed_ns: int | None = None  # when the addresses of all were last asked for

    def note_present(self, nodes: Iterable[str]) -> None:
        """Note that these nodes are here, and so not elsewhere."""
        self.present.update(node for node in nodes if node in self._last)

    def note_ended(self, nodes: Iterable[str]) -> None:
        """Note that these nodes have certainly ended, before they could go elsewhere."""
        self._ended.update(nodes)

    def note_promise(self, node: str, is_promised: bool) -> None:
        """Note whether this node may have been given a place elsewhere."""
        (self._promised.add if is_promised else self._promised.discard)(node)

    def count_missing(self, here: Collection[str], has_moved: bool) -> int:
        """Return how many more nodes must be here; 0 where no node may go on elsewhere."""
        if not self._rules.rehost:
            return 0
        counting = [node for node in here if node not in self._promised]
        return count_missing(self._last, self._ended, counting, has_moved)

    def meeting_addresses(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return where the agents of these nodes listen, by node."""
        known = [self._last[node] for node in nodes if node in self._last]
        return {node.id: node.meeting for node in known if node.meeting}

    def addresses_to_probe(self, now_ns: int, hoped_for: AbstractSet[str]) -> dict[str, str]:
        """Return where the agents of all nodes of the last round listen; {} if one is `hoped_for`, or for a pause.

        Only the end of all is conclusive: some may have ended after they went on elsewhere.
        """
        left = self._last.keys() - self._ended
        if not self._rules.rehost or left & hoped_for:
            return {}
        if self._probed_ns is not None and now_ns < self._probed_ns + self._rules.silence_ns:
            return {}
        self._probed_ns = now_ns
        addresses = {node: self._last[node].meeting for node in left}
        return addresses if all(addresses.values()) else {}
