"""How long the store, which this node asks every heartbeat, has been silent. Pure."""

from __future__ import annotations

from ronde.rendezvous.rules import Rules

__all__ = ["StoreSilence"]


class StoreSilence:
    """The time since the store's last answer, by this node's clock."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._answered_ns = 0
        self._woke_ns = -(10**18)  # when this process last woke late

    def note_answer(self, now_ns: int) -> None:
        """Note that the store has answered, or that the node asks it for the first time."""
        self._answered_ns = now_ns

    def note_late_tick(self, now_ns: int) -> None:
        """Count from now on: this process slept, so the silence was not the store's."""
        self._answered_ns = self._woke_ns = now_ns

    def silent_ns(self, now_ns: int) -> int:
        """Return the time since the last answer."""
        return now_ns - self._answered_ns

    def is_fresh(self, now_ns: int) -> bool:
        """Return whether the silence is so short that the others cannot have gone on without this node."""
        since_ns = now_ns - self._woke_ns
        return since_ns > self._rules.heartbeat_ns and self.silent_ns(now_ns) < 2 * self._rules.heartbeat_ns

    def has_just_woken(self, now_ns: int) -> bool:
        """Return whether this process woke late so recently that states written meanwhile may still arrive."""
        return now_ns - self._woke_ns < self._rules.silence_ns

    def is_cut_off(self, now_ns: int) -> bool:
        """Return whether the silence is so long that the others may have gone on."""
        return self.silent_ns(now_ns) >= self._rules.silence_ns
