"""A node's copy of the state and its roster, and the state that the node is writing. Pure.

Nodes change the state by compare-and-set only, and no two states are equal: a node that builds on an outdated state
learns so from the value that comes back. It has one write under way at a time.
"""

from __future__ import annotations

from ronde.rendezvous.codec import decode_roster, decode_state, encode, encode_roster
from ronde.rendezvous.effects import Compare, Effect, FindChanges, Set, Values
from ronde.rendezvous.membership import Node
from ronde.rendezvous.state import JobState, RosterKey

__all__ = ["StateReplica"]


class StateReplica:
    """The copy. `state`: as last read, from `raw`; `roster`: as last read, by group rank; `writing`: under way.

    `replaced`: the state that the last write replaces.
    """

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.raw = b""
        self.roster: tuple[Node, ...] = ()
        self.writing: bytes | None = None
        self.replaced: JobState | None = None
        self._roster_key: RosterKey | None = None  # of `roster`
        self._draft: tuple[RosterKey, tuple[Node, ...]] | None = None  # a roster under way

    @property
    def is_open(self) -> bool:
        """Whether there is a job that goes on."""
        return self.state is not None and self.state.is_open

    @property
    def is_whole(self) -> bool:
        """Whether the copy includes the roster that the state names, if it names one."""
        return self.state is not None and self.state.roster == self._roster_key

    # Reading

    def forget_state(self) -> None:
        """Forget the state, so that the next one read counts whatever its version."""
        self.state, self.raw = None, b""

    def read_state(self, raw: bytes) -> bool:
        """Take over this state; return whether it is a new one. Raises ProtocolError or VersionError."""
        state = decode_state(raw)
        if self.state and state.version <= self.state.version:
            return False  # an older state that arrived late
        self.state, self.raw = state, raw
        if self._draft and self._draft[0] == state.roster:
            self._roster_key, self.roster = self._draft
        return True

    def request_roster(self) -> list[Effect]:
        """Return the effect that reads the roster which the state names, if it names one."""
        return (
            [FindChanges(dict.fromkeys(self.state.roster.keys))] if self.state and self.state.roster else []
        )

    def read_roster(self, found: Values) -> bool:
        """Take over the roster if `found` is all of it; return whether it is. Raises ProtocolError or VersionError."""
        state = self.state
        parts = [found.get(key) for key in state.roster.keys] if state and state.roster else [None]
        if state is None or None in parts:
            return False  # the roster of another state
        self.roster, self._roster_key = decode_roster(tuple(part for part in parts if part)), state.roster
        return True

    # Writing

    def write_state(self, state: JobState, roster: tuple[Node, ...] | None = None) -> list[Effect]:
        """Return the effects that replace the known state by this one, after writing its roster if one is given."""
        effects: list[Effect] = []
        if state.roster and roster is not None:
            self._draft = state.roster, roster  # it counts once the state names it
            effects.append(Set(dict(zip(state.roster.keys, encode_roster(roster)))))
        self.writing, self.replaced = encode(state), self.state
        return [*effects, Compare(self.raw, self.writing)]
