"""Ranks that wait for each other in circles. Pure.

A rank waits for all that have not begun what it sleeps in, and sleeps until the last of them has. So a rank that waits
for itself by way of others, each of which sleeps, never goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

__all__ = ["circle_through", "entangled_with"]

WaitsFor = Mapping[int, Collection[int]]  # by rank that sleeps


def circle_through(rank: int, waits_for: WaitsFor) -> tuple[int, ...]:
    """Return the shortest circle of ranks, each waiting for the next, from this one on; empty if it is on none."""
    came_from: dict[int, int] = {}
    queue = deque([rank])
    while queue and rank not in came_from:
        current = queue.popleft()
        for other in sorted(waits_for.get(current, ())):
            if other not in came_from:
                came_from[other] = current
                queue.append(other)
    if rank not in came_from:
        return ()
    circle = [came_from[rank]]
    while circle[-1] != rank:
        circle.append(came_from[circle[-1]])
    return tuple(reversed(circle))


def entangled_with(rank: int, waits_for: WaitsFor) -> set[int]:
    """Return all ranks that are on a circle with this one; empty if it is on none."""
    waited_for_by: dict[int, set[int]] = {}
    for waiting, others in waits_for.items():
        for other in others:
            waited_for_by.setdefault(other, set()).add(waiting)
    return _reachable(rank, waits_for) & _reachable(rank, waited_for_by)


def _reachable(rank: int, edges: WaitsFor) -> set[int]:
    """In one step or more."""
    found: set[int] = set()
    queue = [rank]
    while queue:
        fresh = set(edges.get(queue.pop(), ())) - found
        found |= fresh
        queue += fresh
    return found
