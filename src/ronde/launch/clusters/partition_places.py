"""Decides which slots get which partitions of a data frame that lies on the workers of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["deal_partitions"]


def deal_partitions(holders: Sequence[Collection[str]], places: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the partitions of each slot, in ascending order.

    All slots get the same number of partitions, or one less, preferably those that their workers hold.

    Args:
        holders: For each partition the workers that hold it.
        places: For each slot its worker; "" if that is not known.

    Raises:
        Nothing.
    """
    share, longer = divmod(len(holders), len(places))
    dealt: list[list[int]] = [[] for _ in places]
    room = [share + (slot < longer) for slot in range(len(places))]
    elsewhere = []
    for number, workers in enumerate(holders):
        slot = next((slot for slot, place in enumerate(places) if place in workers and room[slot]), None)
        if slot is None:
            elsewhere.append(number)
        else:
            dealt[slot].append(number)
            room[slot] -= 1
    for number in elsewhere:
        slot = max(range(len(places)), key=room.__getitem__)
        dealt[slot].append(number)
        room[slot] -= 1
    return [sorted(numbers) for numbers in dealt]
