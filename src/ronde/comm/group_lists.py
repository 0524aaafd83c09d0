"""Whether the lists of ranks fit together that all ranks of a communicator pass to `group`. Pure.

Each rank tells a note of its list, of few numbers whatever its length. Notes are equal if the lists are. All ranks have
all notes, so they decide alike. Only an error needs lists, two of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["ListNote", "contradiction_of", "note_of"]

_SHOWN = 32  # ranks of a list in an error


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
