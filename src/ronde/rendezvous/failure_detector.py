"""The leader's failure detector: which nodes live, and which have been silent for too long. Pure.

1. The leader reads heartbeats twice per heartbeat interval. A node without a new heartbeat for the time of silence is a
   suspect; it is lost if one more reading, begun after that, brings nothing new.
2. If the leader itself was late to read, it grants every node the full time again.
3. The first heartbeat of a node may be left over from before: only the next one shows that the node lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass

from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import Heartbeat

__all__ = ["FailureDetector"]


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
