"""The failure detectors: a leader's of the nodes, a member's of the leader, and a node's of the store. Pure.

The nodes

1. The leader reads heartbeats twice per heartbeat interval. A node without a new heartbeat for the time of silence is a
   suspect; it is lost if one more reading, begun after that, brings nothing new.
2. If the leader itself was late to read, it grants every node the full time again.
3. The first heartbeat of a node may be left over from before: only the next one shows that the node lives.

The leader

4. A leader is lost when the key that it holds is gone, or when it has been silent for `missing_heartbeats` heartbeats
   and one more reading brings nothing new.
5. Its successor counts it as dead at once only if this node has seen the leader's key since this node's sentinel was
   set. After the store was away the leader may still be reconnecting: then only its silence counts.

The store

6. Every node asks the store once per heartbeat interval. If the store is silent for `missing_heartbeats` intervals, the
   others may have gone on without this node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass
from typing import NamedTuple

from ronde.rendezvous.effects import Values
from ronde.rendezvous.membership import Rules
from ronde.rendezvous.state import ALIVE, Heartbeat, alive_key, heartbeat_key

__all__ = [
    "FailureDetector",
    "LeaderDetector",
    "LeaderLoss",
    "StoreSilence",
]


@dataclass(slots=True)
class _SignsOfLife:
    heartbeat: Heartbeat | None
    alive_ns: int  # when the reading began that last showed that the node lives
    received_ns: int  # when the last heartbeat arrived


class FailureDetector:
    """Judges nodes by heartbeats. `read_ns`: when the next reading is due; `asked_ns`: when the last one began."""

    def __init__(self, rules: Rules, nodes: Iterable[str], now_ns: int) -> None:
        self.silence_ns = (2 * rules.missing_heartbeats - 1) * rules.heartbeat_ns // 2
        self.read_ns = self.asked_ns = now_ns
        self._heartbeat_ns = rules.heartbeat_ns
        self._signs = {node: _SignsOfLife(None, now_ns, now_ns) for node in nodes}
        self._suspects: set[str] = set()  # silent for too long, unless the present reading brings a heartbeat

    @property
    def nodes(self) -> KeysView[str]:
        """The ids of the nodes under observation."""
        return self._signs.keys()

    def add_node(self, now_ns: int, node: str) -> None:
        """Observe this node from now on, and forget its earlier heartbeats."""
        self._signs[node] = _SignsOfLife(None, now_ns, now_ns)

    def renew_nodes(self, now_ns: int, nodes: Iterable[str]) -> None:
        """Count these nodes as alive now, for a reason other than a heartbeat."""
        for node in nodes:
            self._signs[node].alive_ns = now_ns

    def remove_node(self, node: str) -> None:
        """Stop observing this node."""
        self._signs.pop(node, None)

    def begin_reading(self, now_ns: int) -> bool:
        """Begin a reading of the heartbeats if one is due; return whether it is."""
        if now_ns < self.read_ns:
            return False
        if now_ns - self.read_ns > self._heartbeat_ns:  # this process slept, perhaps with the others
            self.renew_nodes(now_ns, self._signs)
        self.asked_ns, self.read_ns = now_ns, now_ns + max(self._heartbeat_ns // 2, 1)
        return True

    def suspect_silent_nodes(self, now_ns: int) -> None:
        """Suspect every node that has been silent for too long; the reading that begins now decides."""
        self._suspects = {
            node for node, signs in self._signs.items() if now_ns - signs.alive_ns >= self.silence_ns
        }

    def last_heartbeat_ns(self, node: str) -> int:
        """Return when the last heartbeat of this node arrived."""
        return self._signs[node].received_ns

    def note_heartbeat(self, now_ns: int, node: str, heartbeat: Heartbeat | None) -> bool:
        """Note a heartbeat that differs from the known one; return whether it shows that the node lives."""
        signs = self._signs[node]
        shows_life, signs.heartbeat, signs.received_ns = signs.heartbeat is not None, heartbeat, now_ns
        if shows_life:
            signs.alive_ns = self.asked_ns
        return shows_life

    def confirm_silence(self, asked: Iterable[str], heard: Collection[str]) -> set[str]:
        """Return the suspects among the nodes `asked` for that are not among those `heard`: they are lost."""
        silent = (self._suspects & set(asked)) - set(heard)
        self._suspects -= silent
        return silent


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


class StoreSilence:
    """The time since the store's last answer, by this node's clock."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._answered_ns = 0
        self._woke_ns = -(10**18)  # when this process last woke late, or came back from a long silence

    def note_answer(self, now_ns: int) -> None:
        """Note that the store has answered, or that the node asks it for the first time."""
        self._answered_ns = now_ns

    def note_late_tick(self, now_ns: int) -> None:
        """Count from now on: this process slept, so the silence was not the store's."""
        self._answered_ns = self._woke_ns = now_ns

    def note_return(self, now_ns: int) -> None:
        """Note that the node starts over at a store; after a long silence, what it knows may be old."""
        if self.is_cut_off(now_ns):
            self._woke_ns = now_ns

    def silent_ns(self, now_ns: int) -> int:
        """Return the time since the last answer."""
        return now_ns - self._answered_ns

    def is_fresh(self, now_ns: int) -> bool:
        """Return whether the silence is so short that the others cannot have gone on without this node."""
        since_ns = now_ns - self._woke_ns
        return since_ns > self._rules.heartbeat_ns and self.silent_ns(now_ns) < 2 * self._rules.heartbeat_ns

    def has_just_woken(self, now_ns: int) -> bool:
        """Return whether this process woke late, or came back, so recently that newer states may still arrive."""
        return now_ns - self._woke_ns < self._rules.silence_ns

    def is_cut_off(self, now_ns: int) -> bool:
        """Return whether the silence is so long that the others may have gone on."""
        return self.silent_ns(now_ns) >= self._rules.silence_ns
