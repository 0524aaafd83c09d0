"""The assignment of group ranks to the nodes of a round, and their names in messages. Pure.

1. A node that wishes for a rank gets it. Of two such nodes, the one that had the rank gets it, else the earlier one.
2. A node of the last round keeps its rank if the rank still exists.
3. The remaining ranks go, from the lowest, first to nodes whose old rank no longer exists, then to newcomers in the
   order of their host names (numbers in them count as numbers), so that neighbouring hosts get neighbouring ranks, and
   nodes that share a host follow each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ronde.rendezvous.membership import Node

__all__ = ["assign_group_ranks", "host_order", "node_names"]


def assign_group_ranks(last: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes by group rank. `last`: the last round's, by theirs; `nodes`: in the order of their arrival."""
    had = {node.id: place for place, node in enumerate(last)}
    size = len(nodes)
    places: dict[int, Node] = {}

    def take(place: int, node: Node) -> bool:
        if 0 <= place < size and place not in places:
            places[place] = node
            return True
        return False

    wishing = sorted(
        (node for node in nodes if node.wish >= 0), key=lambda node: had.get(node.id) != node.wish
    )
    left = [node for node in nodes if node.wish < 0]
    left += [node for node in wishing if not take(node.wish, node)]
    left = [node for node in left if not take(had.get(node.id, -1), node)]
    displaced = sorted((node for node in left if node.id in had), key=lambda node: had[node.id])
    newcomers = sorted(
        (node for node in left if node.id not in had), key=lambda node: (host_order(node.host), node.host_id)
    )
    holes = (place for place in range(size) if place not in places)
    places |= dict(zip(holes, [*displaced, *newcomers]))
    return tuple(places[place] for place in range(size))


def host_order(host: str) -> list[tuple[int, str]]:
    """Return the sorting key by which node2 comes before node10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", host) if part]


def node_names(some: Iterable[Node], nodes: Sequence[Node]) -> list[str]:
    """Return the names of some nodes of a round, for messages: their hosts, with numbers for agents of one host.

    `nodes`: those of the round, in the order of their group ranks.
    """
    numbers = {node.id: number for number, node in enumerate(nodes)}
    counts = Counter(node.host for node in nodes)
    return [
        f"{node.host} (node {numbers[node.id]})"
        if counts[node.host] > 1 and node.id in numbers
        else node.host
        for node in some
    ]
