"""Finds ranks that wait for each other in a circle. Pure.

A rank waits for all ranks that have not begun its operation, until the last of them begins it. So ranks that wait for
each other in a circle never continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

__all__ = ["circle_through", "entangled_with"]

WaitsFor = Mapping[int, Collection[int]]  # by waiting rank: the ranks it waits for


def circle_through(rank: int, waits_for: WaitsFor) -> tuple[int, ...]:
    """Return the shortest circle of ranks, each waiting for the next, that begins with this rank; () if none does."""
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
    """Return all ranks that are on a circle with this rank; an empty set if no circle contains it."""
    waited_for_by: dict[int, set[int]] = {}
    for waiting, others in waits_for.items():
        for other in others:
            waited_for_by.setdefault(other, set()).add(waiting)
    return _reachable(rank, waits_for) & _reachable(rank, waited_for_by)


def _reachable(rank: int, edges: WaitsFor) -> set[int]:
    """Return the ranks that one or more edges lead to."""
    found: set[int] = set()
    queue = [rank]
    while queue:
        fresh = set(edges.get(queue.pop(), ())) - found
        found |= fresh
        queue += fresh
    return found
