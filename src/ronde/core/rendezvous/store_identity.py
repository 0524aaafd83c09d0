"""The store where this node is: is it the one that it knows, and do the nodes meet here? Pure.

A node that comes to a store, or comes back, looks at the state there first. It may be the one that it knows, or a newer
one; then that counts. A store may also have lost its memory, or be another one in its place; then whoever knows more
writes all that it knows. Who knows of no round waits a moment for somebody who does. Until then the node does not take
part in anything here. So does who was frozen just now: the others may have gone on, and come a moment later.
"""

from __future__ import annotations

from enum import Enum, auto

from ronde.core.rendezvous.state import JobPhase, JobState
from ronde.core.rendezvous.state_replica import StateReplica

__all__ = ["Finding", "StoreIdentity"]


class Finding(Enum):
    """What the state that was found is to this node."""

    THEIRS = auto()  # it counts
    OURS = auto()  # what we know counts, and has to be written here
    NONE = auto()  # there is no job yet
    UNCLEAR = auto()  # somebody else may know more, and write it


class StoreIdentity:
    """The machine. `is_unclear`: that is still to be found out; `is_elsewhere`: this is not the store that we know."""

    def __init__(self, replica: StateReplica) -> None:
        self.is_unclear = False
        self.is_elsewhere = False
        self._replica = replica
        self._may_wait_for_others = False  # for others who know more

    @property
    def is_away(self) -> bool:
        """Whether the others may look for this node at another store."""
        return self.is_unclear or self.is_elsewhere

    def reset(self) -> None:
        """Nothing is known of the store."""
        self._may_wait_for_others = self.is_unclear = True

    def judge_state(self, raw: bytes, theirs: JobState | None, is_behind: bool = False) -> Finding:
        """This was found: `theirs` is what `raw` says, if there is anything. `is_behind`: we may know an old state."""
        replica, mine = self._replica, self._replica.state
        may_wait, self._may_wait_for_others = self._may_wait_for_others, False
        if theirs and (mine is None or raw == replica.raw or theirs.is_newer(mine, self.is_elsewhere)):
            self.is_unclear = False
            return Finding.THEIRS
        self.is_unclear = True  # until it is written, by us or somebody who knows more
        is_enough = mine is not None and mine.roster is not None and not is_behind
        if mine and replica.is_whole and (is_enough or not may_wait):
            return Finding.OURS
        if mine or may_wait:
            return Finding.UNCLEAR
        self.is_unclear = False
        return Finding.NONE

    # Whether they meet here

    @property
    def is_settled(self) -> bool:
        """Whether the nodes meet here, and cannot do so elsewhere."""
        state = self._replica.state
        return state is not None and not self.is_unclear and not state.has_moved

    @property
    def is_calling(self) -> bool:
        """Whether those who meet elsewhere belong here: a round goes on, or may begin as soon as they are here."""
        state = self._replica.state
        if state is None or not self.is_settled:
            return False
        return state.phase == JobPhase.RUNNING or (state.phase == JobPhase.FORMING and not state.missing)

    @property
    def present_nodes(self) -> list[str] | None:
        """The nodes of the last round that surely are here: as long as it goes on. None: not even whose store it is."""
        state = self._replica.state
        if state is None or not self.is_settled:
            return None
        is_known = state.phase == JobPhase.RUNNING and self._replica.is_whole
        return [node.id for node in self._replica.roster] if is_known else []
