"""The topology of a communicator, computed from the host of each rank. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Topology", "compute_topology"]


@dataclass(frozen=True)
class Topology:
    """The place of one rank among all ranks of a communicator.

    Ranks of one host have `local_rank` 0 to `local_size` - 1, in the order of their ranks; `local_ranks` are their
    ranks in the communicator. `hosts`: the name of each rank's host, for messages; `host_of`: its number, where hosts
    are counted in the order of their lowest ranks. `cross_rank` and `cross_size` count the hosts that have a rank with
    this rank's local rank, as in Horovod. `is_homogeneous`: all hosts have the same number of ranks.
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
        """The lowest rank of this rank's host."""
        return self.local_ranks[0]

    def is_local(self, rank: int) -> bool:
        """Return whether the rank is on this rank's host."""
        return self.host_of[rank] == self.host_of[self.rank]

    def of_ranks(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of the ranks, this one among them, numbered in this order."""
        hosts = [self.hosts[rank] for rank in ranks]
        return compute_topology(ranks.index(self.rank), [self.host_of[rank] for rank in ranks], hosts)


def compute_topology(rank: int, host_keys: Sequence[Hashable], hosts: Sequence[str]) -> Topology:
    """Return the topology from the point of view of `rank`.

    `host_keys`, by rank: ranks with equal keys share a host. `hosts`, by rank: the names of their machines.
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
