"""When the nodes that a leader looks after showed last that they live, and who is silent for too long. Pure.

1. Beats are read twice per heartbeat, and once more before a node is judged. A judge who overslept starts again.
2. The first heartbeat that is read of a node may be an old one: only the next shows that it lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass

from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import Heartbeat

__all__ = ["FailureDetector"]


@dataclass(slots=True)
class _SignsOfLife:
    heartbeat: Heartbeat | None
    alive_ns: int  # when was it asked for that has shown that the node lives
    received_ns: int  # when did we know of the last heartbeat


class FailureDetector:
    """The machine. `read_ns`: when heartbeats are to be read next; `asked_ns`: when they were read last."""

    def __init__(self, rules: Rules, nodes: Iterable[str], now_ns: int) -> None:
        self.silence_ns = (2 * rules.missing_heartbeats - 1) * rules.heartbeat_ns // 2
        self.read_ns = self.asked_ns = now_ns
        self._heartbeat_ns = rules.heartbeat_ns
        self._signs = {node: _SignsOfLife(None, now_ns, now_ns) for node in nodes}
        self._suspects: set[str] = set()  # they are looked at once more

    @property
    def nodes(self) -> KeysView[str]:
        """Who is looked after."""
        return self._signs.keys()

    def add_node(self, now_ns: int, node: str) -> None:
        """Look after this node from now on, whatever was known of it."""
        self._signs[node] = _SignsOfLife(None, now_ns, now_ns)

    def renew_nodes(self, now_ns: int, nodes: Iterable[str]) -> None:
        """There is another reason to believe that these live."""
        for node in nodes:
            self._signs[node].alive_ns = now_ns

    def remove_node(self, node: str) -> None:
        """This node need not be looked after."""
        self._signs.pop(node, None)

    def begin_reading(self, now_ns: int) -> bool:
        """Whether the heartbeats are to be read now."""
        if now_ns < self.read_ns:
            return False
        if (
            now_ns - self.read_ns > self._heartbeat_ns
        ):  # we slept, and know nothing of how long the others did
            self.renew_nodes(now_ns, self._signs)
        self.asked_ns, self.read_ns = now_ns, now_ns + max(self._heartbeat_ns // 2, 1)
        return True

    def suspect_silent_nodes(self, now_ns: int) -> None:
        """Who is silent for too long is lost if the heartbeats that are read now show nothing new."""
        self._suspects = {
            node for node, signs in self._signs.items() if now_ns - signs.alive_ns >= self.silence_ns
        }

    def last_heartbeat_ns(self, node: str) -> int:
        """Return when the last heartbeat of this node came; it was sent before."""
        return self._signs[node].received_ns

    def note_heartbeat(self, now_ns: int, node: str, heartbeat: Heartbeat | None) -> bool:
        """A heartbeat was read that is not the known one. Returns whether that shows that the node lives."""
        signs = self._signs[node]
        shows_life, signs.heartbeat, signs.received_ns = signs.heartbeat is not None, heartbeat, now_ns
        if shows_life:
            signs.alive_ns = self.asked_ns
        return shows_life

    def confirm_silence(self, asked: Iterable[str], heard: Collection[str]) -> set[str]:
        """Return those who were looked at once more, in vain: of those `asked` for these were `heard`."""
        silent = (self._suspects & set(asked)) - set(heard)
        self._suspects -= silent
        return silent
