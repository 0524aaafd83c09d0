"""Sets of ranks as ranges, so that "ranks 0 to 9,999" is as small as "rank 3". Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["RankSet"]


@dataclass(frozen=True, slots=True)
class RankSet:
    """Ranks as `ranges`: pairs of the first and last rank, ascending, with gaps in between."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """Return the set of these ranks, given in any order. Raises ValueError if one occurs twice."""
        return cls(_joined(sorted((rank, rank) for rank in ranks)))

    @classmethod
    def up_to(cls, size: int) -> RankSet:
        """Return the set of the ranks 0 to `size` - 1."""
        return cls(((0, size - 1),)) if size else cls()

    @classmethod
    def union(cls, sets: Iterable[RankSet]) -> RankSet:
        """Return the ranks of disjoint sets. Raises ValueError that names a rank if two sets contain it."""
        return cls(_joined(sorted([each for one in sets for each in one.ranges])))

    @property
    def first(self) -> int:
        """The lowest rank of a set that is not empty."""
        return self.ranges[0][0]

    def within(self, other: RankSet) -> bool:
        """Return whether the other set contains all of these ranks."""
        return self.ranges == other.ranges or all(
            other._range_with(first) == other._range_with(last) >= 0 for first, last in self.ranges
        )

    def _range_with(self, rank: int) -> int:
        """Return the index of the range that contains the rank, or -1."""
        place = bisect.bisect_right(self.ranges, rank, key=lambda each: each[0]) - 1
        return place if place >= 0 and rank <= self.ranges[place][1] else -1

    def __contains__(self, rank: int) -> bool:
        return self._range_with(rank) >= 0

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the sorted ranges, with adjacent ones joined. Raises ValueError if two overlap."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and first <= joined[-1][1] + 1:
            if first <= joined[-1][1]:
                raise ValueError(f"rank {first} comes twice")
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)
