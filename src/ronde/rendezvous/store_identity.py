"""The store's identity: whether it is the store that this node knows, and whether the nodes meet there. Pure.

A node that comes to a store, or comes back, first reads the state there. If it is the known state or a newer one, it
counts. The store may also have lost its data, or be another one in its place: then the node that knows most writes its
state. A node that knows of no round waits a moment for a node that does; so does a node that was frozen just now,
because the others may have gone on and may arrive a moment later. Until the matter is settled, the node takes part in
nothing here.
"""

from __future__ import annotations

from enum import Enum, auto

from ronde.rendezvous.state import JobPhase, JobState
from ronde.rendezvous.state_replica import StateReplica

__all__ = ["Finding", "StoreIdentity"]


class Finding(Enum):
    """Which state counts."""

    THEIRS = auto()  # the one found in the store
    OURS = auto()  # the one that this node knows, which it must write here
    NONE = auto()  # there is no job yet
    UNCLEAR = auto()  # perhaps one that another node knows, and will write


class StoreIdentity:
    """Judges a store by its state. `is_unclear`: not judged yet; `is_elsewhere`: it is not the store that was known."""

    def __init__(self, replica: StateReplica) -> None:
        self.is_unclear = False
        self.is_elsewhere = False
        self._replica = replica
        self._may_wait_for_others = False  # once: for nodes that know more

    @property
    def is_away(self) -> bool:
        """Whether the others may look for this node at another store."""
        return self.is_unclear or self.is_elsewhere

    def reset(self) -> None:
        """Judge the store again."""
        self._may_wait_for_others = self.is_unclear = True

    def judge_state(self, raw: bytes, theirs: JobState | None, is_behind: bool = False) -> Finding:
        """Judge the state that was found.

        `raw`: its text, b"" if there is none; `theirs`: its meaning. `is_behind`: the state that this node knows may be
        an old one.
        """
        replica, mine = self._replica, self._replica.state
        may_wait, self._may_wait_for_others = self._may_wait_for_others, False
        if theirs and (mine is None or raw == replica.raw or theirs.is_newer(mine, self.is_elsewhere)):
            self.is_unclear = False
            return Finding.THEIRS
        self.is_unclear = True  # until a state is written, by this node or one that knows more
        is_enough = mine is not None and mine.roster is not None and not is_behind
        if mine and replica.is_whole and (is_enough or not may_wait):
            return Finding.OURS
        if mine or may_wait:
            return Finding.UNCLEAR
        self.is_unclear = False
        return Finding.NONE

    @property
    def is_settled(self) -> bool:
        """Whether the nodes meet here, and cannot do so elsewhere."""
        state = self._replica.state
        return state is not None and not self.is_unclear and not state.has_moved

    @property
    def is_calling(self) -> bool:
        """Whether nodes elsewhere belong here: a round goes on, or may begin as soon as they arrive."""
        state = self._replica.state
        if state is None or not self.is_settled:
            return False
        return state.phase == JobPhase.RUNNING or (state.phase == JobPhase.FORMING and not state.missing)

    @property
    def present_nodes(self) -> list[str] | None:
        """The nodes of the running round, which surely are here; [] without one, None if the identity is unclear."""
        state = self._replica.state
        if state is None or not self.is_settled:
            return None
        is_known = state.phase == JobPhase.RUNNING and self._replica.is_whole
        return [node.id for node in self._replica.roster] if is_known else []
