"""Which nodes may go on where nobody can say whether the others live: the rule against two worlds of one job. Pure.

A store that one of the nodes serves can be out of reach of some nodes and not of others. Those who lost it meet at the
store of another node, and each side must know by itself that the other one does not go on as well.

1. Only the beginning of a round is decided here: who works in a round that has begun may do so until it is ended.
2. The last round's nodes count, but for those that have certainly ended while they were here: that left, or whose
   machine said so when their connection broke. (Who was silent before it ended may have taken part elsewhere;
   but not if those of whom that could be true are fewer than half.) Where
   the nodes met in that round, at least half of them must be there; where they have moved to, more than half. Both
   cannot be, for no node is at two places.
3. A node that moves takes along what it knows: of two states that of the later round counts, and it asks for a round
   later than any that it may have been given a place in elsewhere. So a round that two places might begin gets another
   number at one of them, whichever nodes they count.
4. A node that has asked for a place in a round, and lost sight of that store without a sign, does not know whether it
   got one. It takes part elsewhere, but does not count.
5. Nobody goes back from where it has moved to. If too few come there, it ends.
6. Once more than half have moved, that is where the nodes meet. While a round goes on there, others are called. Who is
   called forgets what it knew.
7. Where not one of the last round's nodes is, a round begins when the machines of all say that they have ended: nobody
   is left to go on elsewhere, so whoever comes may take over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from ronde.core.rendezvous.membership import Node
from ronde.core.rendezvous.rules import Rules

__all__ = ["Quorum", "count_missing"]


def count_missing(
    last: Collection[str], ended: Collection[str], here: Collection[str], has_moved: bool
) -> int:
    """Return how many more nodes of the last round must be here before it is sure that others cannot go on."""
    living = [node for node in last if node not in ended]
    needed = len(living) // 2 + 1 if has_moved else (len(living) + 1) // 2
    return max(needed - sum(node in here for node in living), 0) if living else 0


class Quorum:
    """What a leader knows of the last round's nodes. `seen`: those who have shown that they are here."""

    def __init__(self, rules: Rules, last: Mapping[str, Node]) -> None:
        self.present: set[str] = set()
        self._rules = rules
        self._last = last
        self._ended: set[str] = set()  # for certain, so they are not elsewhere
        self._promised: set[str] = set()  # they may count elsewhere
        self._probed_ns: int | None = None  # when all doors were asked for last

    def note_present(self, nodes: Iterable[str]) -> None:
        """These are here, so they are not elsewhere."""
        self.present.update(node for node in nodes if node in self._last)

    def note_ended(self, nodes: Iterable[str]) -> None:
        """These have ended for certain, and before they could go elsewhere."""
        self._ended.update(nodes)

    def note_promise(self, node: str, is_promised: bool) -> None:
        """Whether this one may have been given a place elsewhere."""
        (self._promised.add if is_promised else self._promised.discard)(node)

    def count_missing(self, here: Collection[str], has_moved: bool) -> int:
        """Return how many more must be here; none where nobody may go on elsewhere."""
        if not self._rules.rehost:
            return 0
        counting = [node for node in here if node not in self._promised]
        return count_missing(self._last, self._ended, counting, has_moved)

    # Where to find out whether they have ended

    def meeting_addresses(self, nodes: Iterable[str]) -> dict[str, str]:
        """Those of these nodes, whose connections have just broken."""
        known = [self._last[node] for node in nodes if node in self._last]
        return {node.id: node.meeting for node in known if node.meeting}

    def addresses_to_probe(self, now_ns: int, hoped_for: AbstractSet[str]) -> dict[str, str]:
        """Those of all of the last round, now and then, if not one of them is hoped for here.

        If they have ended, there is nobody who could go on elsewhere. That some have says nothing: they may have ended
        there.
        """
        left = self._last.keys() - self._ended
        if not self._rules.rehost or left & hoped_for:
            return {}
        if self._probed_ns is not None and now_ns < self._probed_ns + self._rules.silence_ns:
            return {}
        self._probed_ns = now_ns
        addresses = {node: self._last[node].meeting for node in left}
        return addresses if all(addresses.values()) else {}
