"""The ranks of workers. They follow from the nodes of a round alone, so every node computes the same. Pure.

Global ranks count the workers of all nodes in the order of group ranks; role ranks count those of nodes with the same
role. The cross rank is the position of the worker's node among the nodes that have a worker with its local rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ronde.core.rendezvous.membership import Node

__all__ = ["WorkerRanks", "ranks_of"]


class WorkerRanks(NamedTuple):
    """All ranks and sizes of one worker; `group_rank` and `group_size` count nodes."""

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


def ranks_of(nodes: Sequence[Node], group_rank: int) -> tuple[WorkerRanks, ...]:
    """Return the ranks of the workers of one node, by local rank; `nodes`: by group rank."""
    mine, before = nodes[group_rank], nodes[:group_rank]
    first = sum(node.slots for node in before)
    first_of_role = sum(node.slots for node in before if node.role == mine.role)
    return tuple(
        WorkerRanks(
            rank=first + local_rank,
            size=sum(node.slots for node in nodes),
            local_rank=local_rank,
            local_size=mine.slots,
            cross_rank=sum(node.slots > local_rank for node in before),
            cross_size=sum(node.slots > local_rank for node in nodes),
            group_rank=group_rank,
            group_size=len(nodes),
            role=mine.role,
            role_rank=first_of_role + local_rank,
            role_size=sum(node.slots for node in nodes if node.role == mine.role),
        )
        for local_rank in range(mine.slots)
    )
