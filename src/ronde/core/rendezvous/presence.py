"""How a node shows that it lives, and how it knows that nothing which is held in the store was lost meanwhile. Pure.

Rules

1. A node holds `alive/ID`; it goes with the node's connection. Its heart beats in `beat/ID`, which stays until the node
   has gone and nobody needs to know any more what it said last.
2. A store that restarts, or that this node could not reach for too long, has lost what was held; the clients hold it
   again, each in its own time, so for a while nodes that are well look dead. That is why a node has a *grip*: it holds
   `grip/ID` with one value, and then sets another one, new each time. Whatever lets go of what is held takes that away,
   and the client holds the first value again. So who looks at held keys looks at its own grip at the same time: if that
   is as it was set, whoever has been seen to hold a key since, and does not now, has lost it by itself.
3. When a grip was lost everything begins again. It counts only where one operation comes after the other (`Look`): what
   a `Watch` shows may be older than what is known, and is a reason to look.
"""

from __future__ import annotations

from collections.abc import Mapping

from ronde.core.rendezvous.effects import Delete, Effect, Hold, Set, Values
from ronde.core.rendezvous.lease import Lease
from ronde.core.rendezvous.state import ALIVE, Beat, Rules, alive_key, beat_key
from ronde.core.rendezvous.text import encode

__all__ = ["Presence"]

HELD = b"held"


class Presence:
    """The machine. `id` is set before all else; `beat_ns`: when the heart beats next; `grip`: what has to be looked
    at together with keys that others hold.
    """

    def __init__(self, rules: Rules) -> None:
        self.id = ""
        self.beat_ns = 0
        self._rules = rules
        self.grip: dict[str, bytes] = {}
        self.lease = Lease(rules)
        self._stored: bytes | None = None  # the last heartbeat that the store has, if that is news
        self._grip_key = ""
        self._arrivals = 0
        self._beats = 0
        self._succeeded = -1
        self._has_ended = False

    def arrive(self, now_ns: int) -> list[Effect]:
        """Hold what is held, which another store may have to learn."""
        self._arrivals += 1
        self._stored = None
        self._grip_key = f"grip/{self.id}"
        self.grip = {self._grip_key: b"%d" % self._arrivals}
        holds = [Hold(alive_key(self.id), ALIVE), Hold(self._grip_key, HELD)]
        return [*holds, Set(self.grip), *self.beat(now_ns)]

    def beat(self, now_ns: int, succeeded: int | None = None) -> list[Effect]:
        """Show that this node lives, and in which round its workers succeeded last."""
        self._succeeded = self._succeeded if succeeded is None else succeeded
        self._beats += 1
        self.beat_ns = now_ns + self._rules.heartbeat_ns
        beat = encode(Beat(self._beats, self._succeeded))
        self.lease.send(now_ns, beat)
        return [] if self._has_ended else [Set({beat_key(self.id): beat})]

    def note_stored(self, values: Mapping[str, bytes]) -> None:
        """The store has these values."""
        self._stored = values.get(beat_key(self.id), self._stored)

    def has_lease(self, now_ns: int) -> bool:
        """Return whether this node may have workers."""
        return not self.lease.has_ended(now_ns)

    def renew_lease(self) -> bool:
        """The store is the one where the others look for our heartbeats. Returns whether it has a new one."""
        stored, self._stored = self._stored, None
        if stored is not None:
            self.lease.confirm(stored)
        return stored is not None

    def end(self) -> list[Effect]:
        """The job is over: nobody looks for beats any more."""
        if self._has_ended:
            return []
        self._has_ended = True
        return [Delete((beat_key(self.id),))]

    def is_old(self, asked: Values) -> bool:
        """Whether this was asked before our last arrival."""
        return self._grip_key in asked and asked[self._grip_key] != self.grip[self._grip_key]

    def was_lost(self, changed: Values) -> bool:
        """Whether our grip was, and so what others hold may be."""
        return self._grip_key in changed and changed[self._grip_key] != self.grip[self._grip_key]
