"""How a node shows that it lives, and how it knows that nothing which is held in the store was lost meanwhile. Pure.

Rules

1. A node holds `alive/ID`; it goes with the node's connection. Its heartbeats are in `heartbeat/ID`, which stays until
   the node has gone and nobody needs to know any more what it said last.
2. A store that restarts, or that this node could not reach for too long, has lost what was held; the clients hold it
   again, each in its own time, so for a while nodes that are well look dead. That is why a node has a *sentinel*: it
   holds `sentinel/ID` with one value, and then sets another one, new each time. Whatever lets go of what is held takes
   that away, and the client holds the first value again. So who looks at held keys looks at its own sentinel at the
   same time: if that is as it was set, whoever has been seen to hold a key since, and does not now, has lost it by
   itself.
3. When a sentinel was lost everything begins again. It counts only where operations are ordered (`FindChanges`):
   what a `Watch` shows may be older than what is known, and is a reason to look.
"""

from __future__ import annotations

from collections.abc import Mapping

from ronde.core.rendezvous.codec import encode
from ronde.core.rendezvous.effects import Delete, Effect, Hold, Set, Values
from ronde.core.rendezvous.lease import WorkerLease
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import ALIVE, Heartbeat, alive_key, heartbeat_key

__all__ = ["Liveness"]

HELD = b"held"


class Liveness:
    """The machine. `id` is set before all else; `next_heartbeat_ns`: when the next heartbeat is due; `sentinel`: what
    has to be looked at together with keys that others hold.
    """

    def __init__(self, rules: Rules) -> None:
        self.id = ""
        self.next_heartbeat_ns = 0
        self._rules = rules
        self.sentinel: dict[str, bytes] = {}
        self.lease = WorkerLease(rules)
        self._stored: bytes | None = None  # the last heartbeat that the store has, if that is news
        self._sentinel_key = ""
        self._sentinels = 0
        self._heartbeats = 0
        self._succeeded = -1
        self._has_ended = False

    def hold_keys(self, now_ns: int) -> list[Effect]:
        """Hold what is held, which another store may have to learn."""
        self._sentinels += 1
        self._stored = None
        self._sentinel_key = f"sentinel/{self.id}"
        self.sentinel = {self._sentinel_key: b"%d" % self._sentinels}
        holds = [Hold(alive_key(self.id), ALIVE), Hold(self._sentinel_key, HELD)]
        return [*holds, Set(self.sentinel), *self.send_heartbeat(now_ns)]

    def send_heartbeat(self, now_ns: int, succeeded: int | None = None) -> list[Effect]:
        """Show that this node lives, and in which round its workers succeeded last."""
        self._succeeded = self._succeeded if succeeded is None else succeeded
        self._heartbeats += 1
        self.next_heartbeat_ns = now_ns + self._rules.heartbeat_ns
        heartbeat = encode(Heartbeat(self._heartbeats, self._succeeded))
        self.lease.note_sent(now_ns, heartbeat)
        return [] if self._has_ended else [Set({heartbeat_key(self.id): heartbeat})]

    def note_stored(self, values: Mapping[str, bytes]) -> None:
        """The store has these values."""
        self._stored = values.get(heartbeat_key(self.id), self._stored)

    def has_lease(self, now_ns: int) -> bool:
        """Return whether this node may have workers."""
        return not self.lease.has_ended(now_ns)

    def renew_lease(self) -> bool:
        """The store is the one where the others look for our heartbeats. Returns whether it has a new one."""
        stored, self._stored = self._stored, None
        if stored is not None:
            self.lease.note_confirmed(stored)
        return stored is not None

    def end_heartbeats(self) -> list[Effect]:
        """The job is over: nobody looks for heartbeats any more."""
        if self._has_ended:
            return []
        self._has_ended = True
        return [Delete((heartbeat_key(self.id),))]

    def is_outdated(self, asked: Values) -> bool:
        """Whether this was asked before our last arrival."""
        return self._sentinel_key in asked and asked[self._sentinel_key] != self.sentinel[self._sentinel_key]

    def has_lost_sentinel(self, changed: Values) -> bool:
        """Whether our sentinel was, and so what others hold may be."""
        return (
            self._sentinel_key in changed and changed[self._sentinel_key] != self.sentinel[self._sentinel_key]
        )
