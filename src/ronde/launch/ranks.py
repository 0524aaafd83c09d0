"""The ranks of workers. They follow from the nodes of a round alone, so every node computes the same. Pure.

1. Global ranks count the workers of all nodes in the order of the nodes; role ranks count those of nodes with the same
   role.
2. Each node counts as one host, as in torchrun; nodes that have the same `host_id` count as one together. Local ranks
   count the workers of a host. Hosts are in the order of their first nodes.
3. The group rank is the position of the worker's host among all hosts; the cross rank, among the hosts that have a
   worker with its local rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ronde.rendezvous.membership import Node

__all__ = ["WorkerRanks", "ranks_of"]


class WorkerRanks(NamedTuple):
    """All ranks and sizes of one worker; `group_rank` and `group_size` count hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    group_rank: int
    group_size: int
    role: str
    role_rank: int
    role_size: int


def ranks_of(nodes: Sequence[Node], place: int) -> tuple[WorkerRanks, ...]:
    """Return the ranks of the workers of the node at this place in the order of `nodes`."""
    mine, before = nodes[place], nodes[:place]
    first = sum(node.slots for node in before)
    first_of_role = sum(node.slots for node in before if node.role == mine.role)
    host_of = [node.host_id or number for number, node in enumerate(nodes)]
    first_of_host = sum(node.slots for node, host in zip(before, host_of) if host == host_of[place])
    workers: dict[Hashable, int] = {}  # by host
    for node, host in zip(nodes, host_of):
        workers[host] = workers.get(host, 0) + node.slots
    sizes = list(workers.values())
    group_rank = list(workers).index(host_of[place])
    return tuple(
        WorkerRanks(
            rank=first + index,
            size=sum(sizes),
            local_rank=local_rank,
            local_size=sizes[group_rank],
            cross_rank=sum(size > local_rank for size in sizes[:group_rank]),
            cross_size=sum(size > local_rank for size in sizes),
            group_rank=group_rank,
            group_size=len(sizes),
            role=mine.role,
            role_rank=first_of_role + index,
            role_size=sum(node.slots for node in nodes if node.role == mine.role),
        )
        for index, local_rank in enumerate(range(first_of_host, first_of_host + mine.slots))
    )
