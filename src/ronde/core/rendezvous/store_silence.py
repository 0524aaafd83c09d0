"""For how long nothing was heard of the store, which is asked every heartbeat. Pure."""

from __future__ import annotations

from ronde.core.rendezvous.rules import Rules

__all__ = ["StoreSilence"]


class StoreSilence:
    """The times, of this node's own clock."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._answered_ns = 0
        self._woke_ns = -(10**18)  # when we last overslept

    def note_answer(self, now_ns: int) -> None:
        """The store has answered, or it is asked for the first time."""
        self._answered_ns = now_ns

    def note_late_tick(self, now_ns: int) -> None:
        """We know nothing of how long the store was silent."""
        self._answered_ns = self._woke_ns = now_ns

    def silent_ns(self, now_ns: int) -> int:
        """Return for how long nothing was heard."""
        return now_ns - self._answered_ns

    def is_fresh(self, now_ns: int) -> bool:
        """Return whether that is so short that the others cannot have gone on without this node."""
        since_ns = now_ns - self._woke_ns
        return since_ns > self._rules.heartbeat_ns and self.silent_ns(now_ns) < 2 * self._rules.heartbeat_ns

    def has_just_woken(self, now_ns: int) -> bool:
        """Return whether we overslept so lately that the others may still be about to say what they did meanwhile."""
        return now_ns - self._woke_ns < self._rules.silence_ns

    def is_cut_off(self, now_ns: int) -> bool:
        """Return whether that is so long that the others may have gone on."""
        return self.silent_ns(now_ns) >= self._rules.silence_ns
