"""What a node has read of the state and of the roster that goes with it, and what it is writing. Pure.

The state is changed by compare-and-set only, and no two states are equal: whoever builds on what others cannot see
learns of it by the value that comes back. One write at a time.
"""

from __future__ import annotations

from ronde.core.rendezvous.codec import decode_roster, decode_state, encode, encode_roster
from ronde.core.rendezvous.effects import Compare, Effect, FindChanges, Set, Values
from ronde.core.rendezvous.membership import Node
from ronde.core.rendezvous.state import JobState, RosterKey

__all__ = ["StateReplica"]


class StateReplica:
    """`state` was read last, as `raw`; `roster` is the last one that was read, by group rank."""

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.raw = b""
        self.roster: tuple[Node, ...] = ()
        self.writing: bytes | None = None  # the state that a Compare is to make true
        self.replaced: JobState | None = None  # what the last write has replaced, or is to
        self._roster_key: RosterKey | None = None  # that of `roster`
        self._draft: tuple[RosterKey, tuple[Node, ...]] | None = None  # a roster that is being written

    @property
    def is_open(self) -> bool:
        """Whether there is a job, and it goes on."""
        return self.state is not None and self.state.is_open

    @property
    def is_whole(self) -> bool:
        """Whether we know the roster that the state names, if it names one."""
        return self.state is not None and self.state.roster == self._roster_key

    # Reading

    def forget_state(self) -> None:
        """What is read next counts, whatever its version."""
        self.state, self.raw = None, b""

    def read_state(self, raw: bytes) -> bool:
        """The state is this. Returns whether that is news. Raises ProtocolError or VersionError."""
        state = decode_state(raw)
        if self.state and state.version <= self.state.version:
            return False  # an older one that took longer
        self.state, self.raw = state, raw
        if self._draft and self._draft[0] == state.roster:
            self._roster_key, self.roster = self._draft
        return True

    def request_roster(self) -> list[Effect]:
        """Return how to read the roster that the state names."""
        return (
            [FindChanges(dict.fromkeys(self.state.roster.keys))] if self.state and self.state.roster else []
        )

    def read_roster(self, found: Values) -> bool:
        """These keys have been read. Returns whether that is the roster. Raises ProtocolError or VersionError."""
        state = self.state
        parts = [found.get(key) for key in state.roster.keys] if state and state.roster else [None]
        if state is None or None in parts:
            return False  # it belongs to another state
        self.roster, self._roster_key = decode_roster(tuple(part for part in parts if part)), state.roster
        return True

    # Writing

    def write_state(self, state: JobState, roster: tuple[Node, ...] | None = None) -> list[Effect]:
        """Make this the state if it still is what we know; before that write its roster."""
        effects: list[Effect] = []
        if state.roster and roster is not None:
            self._draft = state.roster, roster  # ours once the state names it
            effects.append(Set(dict(zip(state.roster.keys, encode_roster(roster)))))
        self.writing, self.replaced = encode(state), self.state
        return [*effects, Compare(self.raw, self.writing)]
