"""Compares the lines at which ranks call operations without names, and warns if they differ. Pure.

Operations without names match by their order alone. If two ranks call two of them in different order with equal shapes,
only the lines of the calls show that each result combines different arrays. Different lines are a hint, not a proof,
because a rank may take another branch of an if. So they are a warning, once for each pair of lines.

Only misses are compared. A cached name stands for another call in every cycle of names, so a comparison holds for one
use of it. To compare each use, ranks would have to send its line with an additional message between host leaders.
"""

from __future__ import annotations

from collections.abc import Sequence

from ronde.engine.messages import CallSite

__all__ = ["CallSites"]

_MOST_WARNINGS = 8


class CallSites:
    """The call sites that the coordinator knows: of names that wait, and of pairs that it has warned about."""

    def __init__(self, names: Sequence[int]) -> None:
        """`names`: by rank, its number in messages."""
        self._names = names
        self._lowest: dict[str, dict[str, int]] = {}  # by name and site: the lowest rank that calls there
        self._seen: set[frozenset[str]] = set()
        self._warnings: list[str] = []

    def add(self, call: CallSite, rank: int) -> None:
        """Record that the rank, and perhaps higher ones, calls the operation at this line."""
        lowest = self._lowest.setdefault(call.name, {})
        lowest[call.site] = min(rank, lowest.get(call.site, rank))

    def compare(self, name: str) -> None:
        """Forget the lines of an operation that runs now; warn if they differ between ranks."""
        calls = sorted((rank, site) for site, rank in self._lowest.pop(name, {}).items())
        for rank, site in calls[1:]:
            self._warn(name, calls[0], (rank, site))

    def forget(self, name: str) -> None:
        """Forget the lines of an operation that fails on all ranks: its error says why."""
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
