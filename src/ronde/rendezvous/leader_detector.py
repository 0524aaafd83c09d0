"""A member's failure detector: whether the leader lives. Pure.

Rules

1. A leader is lost when the key that it holds is gone, or when it has been silent for `missing_heartbeats` heartbeats
   and one more reading brings nothing new.
2. Its successor counts it as dead at once only if this node has seen the leader's key since this node's sentinel was
   set. After the store was away the leader may still be reconnecting: then only its silence counts.
"""

from __future__ import annotations

from typing import NamedTuple

from ronde.rendezvous.effects import Values
from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import ALIVE, alive_key, heartbeat_key

__all__ = ["LeaderDetector", "LeaderLoss"]


class LeaderLoss(NamedTuple):
    """The loss of a leader. `is_silent`: it was noticed by silence. `was_seen_alive`: the leader's key was seen before.

    `last_heartbeat`: its value in the store, which shows whether the leader's workers succeeded.
    """

    leader: str
    is_silent: bool
    was_seen_alive: bool
    last_heartbeat: bytes | None


class LeaderDetector:
    """Observes the leader. `loss`: how the leader was lost; None while it lives."""

    def __init__(self, rules: Rules) -> None:
        self.loss: LeaderLoss | None = None
        self._rules = rules
        self._leader, self._term = "", -1
        self._seen_ns = 0  # when the leader last showed that it lives
        self._last_heartbeat: bytes | None = None
        self._is_seen_alive = False
        self._may_be_arriving = False  # at a store that was away, or has taken the place of another
        self._is_suspect = False  # one more reading decides

    def reset(self, now_ns: int) -> None:
        """Forget the leader: the store was away, or is another one."""
        self._leader, self._term = "", -1
        self.renew_leader(now_ns)
        self._may_be_arriving = True

    def renew_leader(self, now_ns: int) -> None:
        """Count the leader as alive now."""
        self.loss, self._seen_ns, self._is_suspect = None, now_ns, False

    def follow_leader(self, now_ns: int, leader: str, term: int) -> bool:
        """Observe this leader; return whether it is another one, whose keys must be read now."""
        if (leader, term) == (self._leader, self._term):
            return False
        is_first = self._term < 0
        self.renew_leader(now_ns)
        self._leader, self._term, self._last_heartbeat = leader, term, None
        self._is_seen_alive, self._may_be_arriving = False, self._may_be_arriving and is_first
        if not leader:  # a new job, which has none yet
            self.loss = LeaderLoss(leader, False, False, None)
        return bool(leader)

    def note_late_tick(self, now_ns: int) -> None:
        """Grant the leader the full time again: this process slept, perhaps with the leader."""
        self._seen_ns = now_ns

    @property
    def wake_ns(self) -> int | None:
        """When to call `must_check_leader`; None: not before the next event."""
        return (
            None
            if self._is_suspect or self.loss or self._term < 0
            else self._seen_ns + self._rules.silence_ns
        )

    def must_check_leader(self, now_ns: int) -> bool:
        """Return whether the leader has been silent for so long that its keys must be read once more."""
        wake_ns = self.wake_ns
        if wake_ns is None or now_ns < wake_ns:
            return False
        self._is_suspect = True
        return True

    @property
    def keys_to_read(self) -> Values:
        """The keys to read in order to find out whether the leader lives, with the known values."""
        return {alive_key(self._leader): None, heartbeat_key(self._leader): self._last_heartbeat}

    @property
    def keys_to_watch(self) -> Values:
        """The keys to watch for signs of the leader, with the known values."""
        return {alive_key(self._leader): ALIVE, heartbeat_key(self._leader): self._last_heartbeat}

    def note_values(self, now_ns: int, asked: Values, changed: Values) -> bool:
        """Note changed values, read while this node's sentinel was intact; return whether to read the leader's keys."""
        alive, heartbeat = alive_key(self._leader), heartbeat_key(self._leader)
        # A deleted heartbeat is no sign of life: a leader deletes its heartbeat when it leaves.
        has_heartbeat = changed.get(heartbeat) is not None
        self._last_heartbeat = changed.get(heartbeat, self._last_heartbeat)
        if has_heartbeat:
            self._seen_ns = now_ns
        if alive not in asked:
            return alive in changed and (changed[alive] is None or not self._is_seen_alive)
        is_silent = self._is_suspect and not has_heartbeat
        self._is_suspect = False
        if changed.get(alive) is not None:
            self._is_seen_alive, self._may_be_arriving = True, False
        elif not self._may_be_arriving:
            self.loss = self.loss or LeaderLoss(
                self._leader, False, self._is_seen_alive, self._last_heartbeat
            )
        if is_silent:
            self.loss = self.loss or LeaderLoss(self._leader, True, self._is_seen_alive, self._last_heartbeat)
        return False
