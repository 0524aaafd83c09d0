"""The barrier at which the ranks of a training meet: in a commit, at its end, and where a program asks for changes.

All ranks come to the same place, or all of them get an error that tells where each one is: a rank that has returned
from its training function does not take the commit of another one for the end of theirs.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ronde.comm import world as comm
from ronde.errors import MismatchError
from ronde.net.connections import named_ranks
from ronde.types import Max

__all__ = ["Place", "pass_barrier"]


class Place(IntEnum):
    """A place of the program."""

    CHECK = 0
    COMMIT = 1
    END = 2


def pass_barrier(place: Place, number: int, is_change_wanted: bool) -> bool:
    """Wait until all ranks have come; return whether any of them wants the members of the job to change.

    Args:
        place: where the program of this rank is.
        number: of the next commit.
        is_change_wanted: what this rank knows.

    Raises:
        MismatchError: ranks are at different places or commits; raised on all ranks.
        PeerError: a rank was lost.
    """
    if comm.size() == 1:
        return is_change_wanted
    words = np.array([is_change_wanted, number, -number, place, -place], np.int64)
    most = comm.world().allreduce(words, op=Max)
    if most[1] != -most[2] or most[3] != -most[4]:
        raise MismatchError(_describe(place, number))
    return bool(most[0])


def _describe(place: Place, number: int) -> str:
    rows = comm.world().allgather(np.array([place, number], np.int64)).reshape(-1, 2)
    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, row in enumerate(rows):
        ranks.setdefault((int(row[0]), int(row[1])), []).append(rank)
    found = "; ".join(
        f"{named_ranks(ranks[key])} {_phrase(*key, len(ranks[key]) > 1)}" for key in sorted(ranks)
    )
    return (
        f"ranks are at different places of the training: {found}. All ranks must make the same number of steps, and "
        "call commit() and check_host_updates() at the same places"
    )


def _phrase(place: int, number: int, are_several: bool) -> str:
    match Place(place):
        case Place.CHECK:
            return f"{'call' if are_several else 'calls'} check_host_updates() before commit {number}"
        case Place.COMMIT:
            return f"{'make' if are_several else 'makes'} commit {number}"
        case Place.END:
            return f"{'have' if are_several else 'has'} returned from the training function before commit {number}"
