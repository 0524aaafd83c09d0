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

__all__ = ["BarrierKind", "pass_barrier"]


class BarrierKind(IntEnum):
    """What the program of a rank does at the barrier."""

    CHECK = 0
    COMMIT = 1
    END = 2


def pass_barrier(kind: BarrierKind, number: int, is_change_wanted: bool) -> bool:
    """Wait until all ranks have come; return whether any of them wants the members of the job to change.

    Args:
        kind: what this rank does.
        number: of the next commit.
        is_change_wanted: what this rank knows.

    Raises:
        MismatchError: ranks are at different places or commits; raised on all ranks.
        PeerError: a rank was lost.
    """
    if comm.size() == 1:
        return is_change_wanted
    words = np.array([is_change_wanted, number, -number, kind, -kind], np.int64)
    most = comm.world().allreduce(words, op=Max)
    if most[1] != -most[2] or most[3] != -most[4]:
        raise MismatchError(_describe(kind, number))
    return bool(most[0])


def _describe(kind: BarrierKind, number: int) -> str:
    rows = comm.world().allgather(np.array([kind, number], np.int64)).reshape(-1, 2)
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


def _phrase(kind: int, number: int, are_several: bool) -> str:
    match BarrierKind(kind):
        case BarrierKind.CHECK:
            return f"{'call' if are_several else 'calls'} check_host_updates() before commit {number}"
        case BarrierKind.COMMIT:
            return f"{'make' if are_several else 'makes'} commit {number}"
        case BarrierKind.END:
            return f"{'have' if are_several else 'has'} returned from the training function before commit {number}"
