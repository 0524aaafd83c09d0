"""Where ranks call operations without names, and the warnings about calls at different lines. Pure.

Operations without names belong together by their order alone. If two ranks call two of them in different order and the
shapes are equal, nothing else tells that each result combines different arrays. Different lines are a hint and no
proof, because a rank may have an if/else for itself: so they are a warning, once for each pair of lines.

Only misses are compared. A cached name stands for another call each time it comes round, so what was compared once says
nothing of the next use: each use would need its line, and another message between the leaders of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ronde.core.messages import CallSite

__all__ = ["CallSites"]

_MOST_WARNINGS = 8


class CallSites:
    """What the coordinator knows of call sites: of the names that wait, and which pairs it has warned about."""

    def __init__(self, names: Sequence[int]) -> None:
        """`names`: by rank, the number by which messages call it."""
        self._names = names
        self._lowest: dict[str, dict[str, int]] = {}  # by name and site: the lowest rank that calls there
        self._seen: set[frozenset[str]] = set()
        self._warnings: list[str] = []

    def add(self, call: CallSite, rank: int) -> None:
        """Note that the rank, and perhaps higher ones, calls the operation there."""
        lowest = self._lowest.setdefault(call.name, {})
        lowest[call.site] = min(rank, lowest.get(call.site, rank))

    def compare(self, name: str) -> None:
        """Forget where the operation is called, as it runs now; warn if ranks call it at different lines."""
        calls = sorted((rank, site) for site, rank in self._lowest.pop(name, {}).items())
        for rank, site in calls[1:]:
            self._warn(name, calls[0], (rank, site))

    def forget(self, name: str) -> None:
        """Forget where the operation is called, as it fails on all ranks and its error says why."""
        self._lowest.pop(name, None)

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _warn(self, name: str, first: tuple[int, str], second: tuple[int, str]) -> None:
        pair = frozenset((first[1], second[1]))
        if pair in self._seen or len(self._seen) == _MOST_WARNINGS:
            return
        self._seen.add(pair)
        here, there = (f"{site} on rank {self._names[rank]}" for rank, site in (first, second))
        self._warnings.append(
            f"unnamed operation '{name}' is called at {here} and at {there}: if these lines pass different arrays, the "
            "result combines them and is wrong; give the operations names (name=...)"
        )
