"""Does the leader live? As one member sees it. Pure.

Rules

1. A leader whose held key is gone is lost; so is one that is silent for `missing_heartbeats` heartbeats, and is found
   silent when it is looked at once more.
2. Who takes its place counts it as dead at once only if it has seen that the leader held its key, with our sentinel as
   it still is. After a store was away the leader may be on its way: then silence decides alone.
"""

from __future__ import annotations

from typing import NamedTuple

from ronde.core.rendezvous.effects import Values
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import ALIVE, alive_key, heartbeat_key

__all__ = ["LeaderDetector", "LeaderLoss"]


class LeaderLoss(NamedTuple):
    """A leader that is lost: whether by silence, or else whether it was seen before."""

    leader: str
    is_silent: bool
    was_seen_alive: bool
    last_heartbeat: bytes | None


class LeaderDetector:
    """The machine. `loss`: the leader is lost, and how."""

    def __init__(self, rules: Rules) -> None:
        self.loss: LeaderLoss | None = None
        self._rules = rules
        self._leader, self._term = "", -1
        self._seen_ns = 0  # when it last showed that it lives
        self._last_heartbeat: bytes | None = None
        self._is_seen_alive = False
        self._may_be_arriving = False
        self._is_suspect = False  # it is looked at once more

    def reset(self, now_ns: int) -> None:
        """The store was away, or is another one."""
        self._leader, self._term = "", -1
        self.renew_leader(now_ns)
        self._may_be_arriving = True

    def renew_leader(self, now_ns: int) -> None:
        """There is a sign of the leader, or we know nothing."""
        self.loss, self._seen_ns, self._is_suspect = None, now_ns, False

    def follow_leader(self, now_ns: int, leader: str, term: int) -> bool:
        """This one leads. Returns whether that is news, and it is to be looked at."""
        if (leader, term) == (self._leader, self._term):
            return False
        is_first = self._term < 0
        self.renew_leader(now_ns)
        self._leader, self._term, self._last_heartbeat = leader, term, None
        self._is_seen_alive, self._may_be_arriving = False, self._may_be_arriving and is_first
        if not leader:  # nobody does yet
            self.loss = LeaderLoss(leader, False, False, None)
        return bool(leader)

    def note_late_tick(self, now_ns: int) -> None:
        """We know nothing of how long the leader was silent."""
        self._seen_ns = now_ns

    @property
    def wake_ns(self) -> int | None:
        """When `must_check_leader` is to be asked."""
        return (
            None
            if self._is_suspect or self.loss or self._term < 0
            else self._seen_ns + self._rules.silence_ns
        )

    def must_check_leader(self, now_ns: int) -> bool:
        """Whether it is silent for so long that it has to be looked at once more."""
        wake_ns = self.wake_ns
        if wake_ns is None or now_ns < wake_ns:
            return False
        self._is_suspect = True
        return True

    @property
    def keys_to_read(self) -> Values:
        """Which keys show whether it lives."""
        return {alive_key(self._leader): None, heartbeat_key(self._leader): self._last_heartbeat}

    @property
    def keys_to_watch(self) -> Values:
        """Which keys are to be watched."""
        return {alive_key(self._leader): ALIVE, heartbeat_key(self._leader): self._last_heartbeat}

    def note_values(self, now_ns: int, asked: Values, changed: Values) -> bool:
        """Something was seen, and our sentinel is as it was. Returns whether the leader is to be looked at."""
        alive, heartbeat = alive_key(self._leader), heartbeat_key(self._leader)
        # A heartbeat that is gone shows nothing: a leader deletes its own when it leaves.
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
