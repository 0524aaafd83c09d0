"""The tree of hosts along which the engine's leaders talk: host 0 at the top, up to `arity` hosts under each. Pure.

Hosts are numbered in the order of their lowest ranks, so rank 0 leads host 0. The tree is filled level by level: under
host h are the hosts h * arity + 1 to h * arity + arity, as far as they exist. `cpp/engine/tree.h` computes the same
tree, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from ronde.rank_set import RankSet

__all__ = ["children", "depth", "parent", "ranks_under"]


def parent(host: int, arity: int) -> int:
    """Return the host above this one; -1 for host 0."""
    return (host - 1) // arity if host > 0 else -1


def children(host: int, hosts: int, arity: int) -> range:
    """Return the hosts directly under this one, of `hosts` in all."""
    first = host * arity + 1
    return range(min(first, hosts), min(first + arity, hosts))


def depth(host: int, arity: int) -> int:
    """Return how many hosts a message passes on its way to host 0, this one included; 0 for host 0 itself."""
    levels = 0
    while host > 0:
        host, levels = parent(host, arity), levels + 1
    return levels


def ranks_under(host: int, ranks_of_host: Sequence[Sequence[int]], arity: int) -> RankSet:
    """Return the ranks of this host and of all hosts under it. `ranks_of_host`: the ranks, by host."""
    ranks: list[int] = []
    waiting = [host]
    while waiting:
        each = waiting.pop()
        ranks += ranks_of_host[each]
        waiting += children(each, len(ranks_of_host), arity)
    return RankSet.of(ranks)
