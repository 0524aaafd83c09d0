"""The ranks of a communicator: which hosts they are on, and whether their lists for a new group fit together. Pure.

`Topology` is computed from the host of each rank.

For `group`, each rank tells a note of its list, of few numbers whatever its length. Notes are equal if the lists are.
All ranks have all notes, so they decide alike. Only an error needs lists, two of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ListNote", "Topology", "compute_topology", "contradiction_of", "note_of"]

_SHOWN = 32  # ranks of a list in an error


@dataclass(frozen=True)
class Topology:
    """The place of one rank among all ranks of a communicator.

    Ranks of one host have `local_rank` 0 to `local_size` - 1, in the order of their ranks; `local_ranks` are their
    ranks in the communicator. `hosts`: the name of each rank's host, for messages; `host_of`: its number, where hosts
    are counted in the order of their lowest ranks. `cross_rank` and `cross_size` count the hosts that have a rank with
    this rank's local rank, as in Horovod. `is_homogeneous`: all hosts have the same number of ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    local_ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    is_homogeneous: bool

    @property
    def leader(self) -> int:
        """The lowest rank of this rank's host."""
        return self.local_ranks[0]

    def is_local(self, rank: int) -> bool:
        """Return whether the rank is on this rank's host."""
        return self.host_of[rank] == self.host_of[self.rank]

    def of_ranks(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of some of the ranks, this one among them, numbered in this order."""
        hosts = [self.hosts[rank] for rank in ranks]
        return compute_topology(ranks.index(self.rank), [self.host_of[rank] for rank in ranks], hosts)


def compute_topology(rank: int, host_keys: Sequence[Hashable], hosts: Sequence[str]) -> Topology:
    """Return the topology from the point of view of `rank`.

    `host_keys`, by rank: ranks with equal keys share a host. `hosts`, by rank: the names of their machines.
    """
    ranks_by_key: dict[Hashable, list[int]] = {}
    for each, key in enumerate(host_keys):
        ranks_by_key.setdefault(key, []).append(each)
    number_by_key = {key: number for number, key in enumerate(ranks_by_key)}
    mine = ranks_by_key[host_keys[rank]]
    local_rank = mine.index(rank)
    across = [ranks for ranks in ranks_by_key.values() if len(ranks) > local_rank]
    return Topology(
        rank=rank,
        size=len(host_keys),
        local_rank=local_rank,
        local_size=len(mine),
        cross_rank=across.index(mine),
        cross_size=len(across),
        local_ranks=tuple(mine),
        hosts=tuple(hosts),
        host_of=tuple(number_by_key[key] for key in host_keys),
        is_homogeneous=len({len(ranks) for ranks in ranks_by_key.values()}) == 1,
    )


# Lists of ranks for `group`


class ListNote(NamedTuple):
    """What a rank tells of its list: four signed numbers of 64 bits."""

    length: int
    is_disjoint: int
    digest_high: int
    digest_low: int


def note_of(ranks: Sequence[int], is_disjoint: bool) -> ListNote:
    """Return the note of a list. `is_disjoint`: the rank has listed its own group, one of several."""
    digest = hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=16).digest()
    high, low = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    return ListNote(len(ranks), int(is_disjoint), high, low)


def contradiction_of(notes: Sequence[ListNote], list_of: Callable[[int], Sequence[int]]) -> str | None:
    """Return an error that names two lists which contradict each other, or None.

    `notes`: by rank. `list_of`: gets the list of a rank from it; all ranks ask for the same lists in the same order.
    """
    first = notes[0]
    for other, note in enumerate(notes):
        if note != first and not (note.is_disjoint and first.is_disjoint):
            calls = _call(list_of(0), first), _call(list_of(other), note)
            return (
                f"rank 0 called {calls[0]}, but rank {other} called {calls[1]}: all ranks list the same ranks in the "
                "same order. To make several groups at once, each rank lists its own group, with disjoint=True"
            )
    if not first.is_disjoint:
        return None
    # Every list contains the rank that passes it. So it fits if as many ranks pass it as it has entries.
    passed = Counter(notes)
    for one, note in enumerate(notes):
        if note.length not in (0, passed[note]):
            members = list_of(one)
            other = next(rank for rank in members if notes[rank] != note)
            calls = _call(members, note), _call(list_of(other), notes[other])
            return (
                f"rank {one} called {calls[0]}, but rank {other} called {calls[1]}: all members of a group list the "
                "same ranks in the same order"
            )
    return None


def _call(ranks: Sequence[int], note: ListNote) -> str:
    more = f", ... {len(ranks)} in all" if len(ranks) > _SHOWN else ""
    listed = ", ".join(map(str, ranks[:_SHOWN]))
    return f"group([{listed}{more}]{', disjoint=True' if note.is_disjoint else ''})"
