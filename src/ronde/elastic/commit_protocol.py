"""Decides to which commit the ranks of a new world go back, and which of them needs the state of another one. Pure.

Commits have numbers from 0. The ranks commit together, in two steps: first a barrier, which no rank passes before all
have come to it, then each rank copies its state over its last copy. So one copy is enough:

  1. While a rank waits at barrier k, its live state is that of commit k, and its copy that of k - 1.
  2. A rank that has passed barrier k knows that all ranks have come to it. It copies, and continues.
  3. If a loss ends the barrier, ranks may differ: some have passed it, others not. A rank that has not passed keeps its
     live state as it is, because it may still be needed: it *stands at* commit k.

After a loss the survivors and new processes form a world, and tell each other their `Standing`. All go to one commit,
the newest that any of them has copied, or one newer if all that have a state stand at that:

  - a rank whose copy has this number goes back to its copy;
  - a rank that stands at it copies its live state;
  - any other rank receives the state of one that has it.

What follows: a commit that one survivor has passed is never taken back, and all ranks have the same state afterwards.
If no rank has a state, all begin, and rank 0 gives its state to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

__all__ = ["NOTHING", "Action", "Decision", "Standing", "decide"]

NOTHING = -1


class Standing(NamedTuple):
    """The state of one rank. `copied`: the commit of its copy. `point`: the commit whose state its live state is.

    Each is `NOTHING` if there is none. `may_advance`: a loss takes no part of the state with it, so that a commit at
    which all survivors stand is complete.
    """

    copied: int = NOTHING
    point: int = NOTHING
    may_advance: bool = True


class Action(Enum):
    """What a rank does to come to the commit."""

    RESTORE = "go back to the copy"
    SAVE = "copy the live state"
    RECEIVE = "receive the state"
    BEGIN = "begin with the live state of rank 0"


class Decision(NamedTuple):
    """Where the ranks go. `number`: the commit; `actions`: by rank; `holders`: the ranks that can give the state."""

    number: int
    actions: tuple[Action, ...]
    holders: tuple[int, ...]


def decide(standings: Sequence[Standing]) -> Decision:
    """Return the decision for ranks with these standings. Every rank computes the same one."""
    newest = max(each.copied for each in standings)
    with_state = [each for each in standings if each != Standing(may_advance=each.may_advance)]
    if not with_state:
        return Decision(0, (Action.BEGIN,) * len(standings), (0,))
    if all(each.point > newest and each.may_advance for each in with_state):
        newest = min(each.point for each in with_state)
    actions = tuple(_action(each, newest) for each in standings)
    holders = tuple(rank for rank, action in enumerate(actions) if action is not Action.RECEIVE)
    return Decision(newest, actions, holders)


def _action(standing: Standing, number: int) -> Action:
    if standing.copied == number:
        return Action.RESTORE
    return Action.SAVE if standing.point == number else Action.RECEIVE
