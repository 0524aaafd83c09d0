"""A node's own signs of life, and the sentinel that shows whether the store has lost held keys. Pure.

Rules

1. A node holds `alive/ID`; the key goes when the node's connection does. Its heartbeats are in `heartbeat/ID`, which
   stays until the node is gone and its last heartbeat has been read.
2. A store that restarts, or that drops a client which it could not reach, loses the held keys. The clients then hold
   them again, each in its own time, so for a while living nodes look dead. Therefore every node has a *sentinel*: it
   holds `sentinel/ID` with one value, then sets the key to another value, new each time. If the store drops held keys,
   it drops the sentinel, and the client restores only the first value. A node reads its own sentinel together with the
   held keys of others: if the sentinel has the value that was set, every key seen since, and gone now, was given up
   by its owner.
3. A node whose sentinel is lost starts over. The rule needs operations in order (`FindChanges`): a `Watch` may report
   values older than the known ones, and is only a reason to read.
"""

from __future__ import annotations

from collections.abc import Mapping

from ronde.rendezvous.codec import encode
from ronde.rendezvous.effects import Delete, Effect, Hold, Set, Values
from ronde.rendezvous.lease import WorkerLease
from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import ALIVE, Heartbeat, alive_key, heartbeat_key

__all__ = ["Liveness"]

HELD = b"held"


class Liveness:
    """Sends heartbeats, holds the keys of this node, and keeps its lease.

    Set `id` before all else. `next_heartbeat_ns`: when the next heartbeat is due; `sentinel`: the key and value to read
    together with keys that others hold.
    """

    def __init__(self, rules: Rules) -> None:
        self.id = ""
        self.next_heartbeat_ns = 0
        self._rules = rules
        self.sentinel: dict[str, bytes] = {}
        self.lease = WorkerLease(rules)
        self._stored: bytes | None = (
            None  # the last heartbeat in the store, unless the lease counts it already
        )
        self._sentinel_key = ""
        self._sentinels = 0
        self._heartbeats = 0
        self._succeeded = -1
        self._awaits_exit = False
        self._has_ended = False

    def hold_keys(self, now_ns: int) -> list[Effect]:
        """Hold this node's keys, in a store that may have lost them, or is another one."""
        self._sentinels += 1
        self._stored = None
        self._sentinel_key = f"sentinel/{self.id}"
        self.sentinel = {self._sentinel_key: b"%d" % self._sentinels}
        holds = [Hold(alive_key(self.id), ALIVE), Hold(self._sentinel_key, HELD)]
        return [*holds, Set(self.sentinel), *self.send_heartbeat(now_ns)]

    def send_heartbeat(
        self, now_ns: int, succeeded: int | None = None, awaits_exit: bool | None = None
    ) -> list[Effect]:
        """Write a heartbeat. None: as in the last one.

        `succeeded`: the round in which all workers of this node have now succeeded. `awaits_exit`: as of `Heartbeat`.
        """
        self._succeeded = self._succeeded if succeeded is None else succeeded
        self._awaits_exit = self._awaits_exit if awaits_exit is None else awaits_exit
        self._heartbeats += 1
        self.next_heartbeat_ns = now_ns + self._rules.heartbeat_ns
        heartbeat = encode(Heartbeat(self._heartbeats, self._succeeded, self._awaits_exit))
        self.lease.note_sent(now_ns, heartbeat)
        return [] if self._has_ended else [Set({heartbeat_key(self.id): heartbeat})]

    def note_stored(self, values: Mapping[str, bytes]) -> None:
        """Note that the store has set these values."""
        self._stored = values.get(heartbeat_key(self.id), self._stored)

    def has_lease(self, now_ns: int) -> bool:
        """Return whether this node may run workers."""
        return not self.lease.has_ended(now_ns)

    def renew_lease(self) -> bool:
        """Count the stored heartbeat, because the others read this store; return whether it is a new one."""
        stored, self._stored = self._stored, None
        if stored is not None:
            self.lease.note_confirmed(stored)
        return stored is not None

    def end_heartbeats(self) -> list[Effect]:
        """Delete the heartbeat and send none any more: the job is over."""
        if self._has_ended:
            return []
        self._has_ended = True
        return [Delete((heartbeat_key(self.id),))]

    def is_outdated(self, asked: Values) -> bool:
        """Return whether this reading was asked for before the keys were last held."""
        return self._sentinel_key in asked and asked[self._sentinel_key] != self.sentinel[self._sentinel_key]

    def has_lost_sentinel(self, changed: Values) -> bool:
        """Return whether the sentinel has another value, so that the store may have lost the keys of others, too."""
        return (
            self._sentinel_key in changed and changed[self._sentinel_key] != self.sentinel[self._sentinel_key]
        )
