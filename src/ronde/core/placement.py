"""Computes the topology of a communicator from the host of each rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Topology", "compute_topology"]


@dataclass(frozen=True)
class Topology:
    """Where one rank stands among all.

    Ranks of one host have `local_rank` 0 to `local_size` - 1, in the order of their ranks; `local_ranks` are their
    ranks in the communicator. `hosts` has the name of each rank's host, for messages; `host_of` its number, which
    counts hosts in the order of their lowest ranks. `cross_rank` and `cross_size` count the hosts that have a rank with
    my local rank, as in Horovod. `is_homogeneous`: all hosts have the same number of ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    local_ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    is_homogeneous: bool

    @property
    def leader(self) -> int:
        """The lowest rank of my host."""
        return self.local_ranks[0]

    def is_local(self, rank: int) -> bool:
        """Whether the rank is on my host."""
        return self.host_of[rank] == self.host_of[self.rank]

    def of_ranks(self, ranks: Sequence[int]) -> Topology:
        """The topology of some of the ranks, numbered in this order; I am one of them."""
        hosts = [self.hosts[rank] for rank in ranks]
        return compute_topology(ranks.index(self.rank), [self.host_of[rank] for rank in ranks], hosts)


def compute_topology(rank: int, host_keys: Sequence[Hashable], hosts: Sequence[str]) -> Topology:
    """Return the topology as `rank` sees it.

    `host_keys`, by rank: equal ones share a host. `hosts`, by rank: the names of their machines.
    """
    ranks_by_key: dict[Hashable, list[int]] = {}
    for each, key in enumerate(host_keys):
        ranks_by_key.setdefault(key, []).append(each)
    number_by_key = {key: number for number, key in enumerate(ranks_by_key)}
    mine = ranks_by_key[host_keys[rank]]
    local_rank = mine.index(rank)
    across = [ranks for ranks in ranks_by_key.values() if len(ranks) > local_rank]
    return Topology(
        rank=rank,
        size=len(host_keys),
        local_rank=local_rank,
        local_size=len(mine),
        cross_rank=across.index(mine),
        cross_size=len(across),
        local_ranks=tuple(mine),
        hosts=tuple(hosts),
        host_of=tuple(number_by_key[key] for key in host_keys),
        is_homogeneous=len({len(ranks) for ranks in ranks_by_key.values()}) == 1,
    )
