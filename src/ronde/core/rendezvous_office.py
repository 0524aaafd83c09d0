"""What is around the leader: it gets the news piece by piece, and understands what the keys of the nodes say. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ronde.core.rendezvous_effects import Effect, Event, Look, Popped, Seen, Values
from ronde.core.rendezvous_leader import Leader
from ronde.core.rendezvous_state import (
    ALIVE,
    Beat,
    EndJob,
    Fail,
    Join,
    Leave,
    Message,
    Phase,
    Rules,
    State,
    Succeed,
    alive_key,
    beat_key,
    inbox,
)
from ronde.core.rendezvous_text import decode
from ronde.core.round import Node
from ronde.errors import ProtocolError

__all__ = ["Office"]


class Office:
    """The machine. `leader` is who decides; `effects` collects what is to be done, take them after each call."""

    def __init__(self, rules: Rules, state: State, roster: Sequence[Node], now_ns: int) -> None:
        self.leader = Leader(rules, state, roster, now_ns)
        self.effects: list[Effect] = []
        self.must_watch = False  # those who came since
        self._backlog: deque[Event] = deque()
        self._beats: dict[str, bytes | None] = {}  # as they were read last, by node
        self._is_missing = False  # our own key: that is not because we are dead
        self._dying: set[str] = set()  # nodes whose keys have gone, and whose last words are being read

    def put(self, event: Event) -> None:
        """Something has happened; `work` comes to it."""
        self._backlog.append(event)

    def work(self, now_ns: int) -> bool:
        """Go on until nothing is left. Returns whether there is something to write, before anything else is done."""
        leader = self.leader
        while not leader.is_urgent:
            is_open = leader.state.phase in (Phase.FORMING, Phase.RUNNING)
            if self._backlog:
                self._pass_on(now_ns, self._backlog.popleft())
            elif is_open and now_ns >= leader.wake_ns:
                self._tick(now_ns)
            else:
                return False
        leader.is_urgent = False
        return True

    def succeed(self, now_ns: int, silent: str, last_beat: bytes | None, how: str) -> None:
        """This leader takes the place of a silent one, which has been looked at once more."""
        self._see(now_ns, {}, {beat_key(silent): last_beat})
        self.leader.lose(now_ns, {silent}, how)

    def _tick(self, now_ns: int) -> None:
        before = self.leader.state
        if self.leader.tick(now_ns):
            self.effects.append(Look({beat_key(node): self._beats.get(node) for node in self.leader.nodes}))
            self.must_watch = True
            if self.leader.state != before:
                self.leader.is_urgent = True

    def _pass_on(self, now_ns: int, event: Event) -> None:
        ours = inbox(self.leader.state.term)
        match event:
            case Popped(queue, values) if queue == ours:
                if len(values) > 1:
                    self._backlog.extendleft(Popped(queue, (value,)) for value in reversed(values))
                elif values:
                    self._hear(now_ns, values[0])
            case Seen(asked, changed):
                self._see(now_ns, asked, changed)

    def _hear(self, now_ns: int, value: bytes) -> None:
        try:
            message: Message = decode(value, Join, Fail, Succeed, Leave, EndJob)  # type: ignore[assignment]
        except ProtocolError:
            return  # of another version: that node learns of it by our state
        if isinstance(message, Join):
            self._beats.pop(message.node.id, None)
        self.leader.hear(now_ns, message)

    def _see(self, now_ns: int, asked: Values, changed: Values) -> None:
        leader = self.leader
        beats: dict[str, Beat | None] = {}
        gone: set[str] = set()
        for key, value in changed.items():
            kind, _, node = key.partition("/")
            if kind == "beat":
                self._beats[node] = value
                beats[node] = _beat(value)
            elif kind == "alive" and value is None and node in leader.nodes:
                gone.add(node)
        ours = alive_key(leader.state.leader)
        self._is_missing = changed.get(ours, None if self._is_missing else ALIVE) is None
        if self._is_missing or (len(gone) > 1 and 2 * len(gone) >= len(leader.nodes)):
            gone = set()  # it is rather the store that has been away: let silence decide
        asked_of = {key.partition("/")[2] for key in asked if key.startswith("beat/")}
        if beats or asked_of:
            leader.hear_beats(now_ns, beats, asked_of)
        # Who has gone may have said something last, and may have come back
        looked_after = {node for node in self._dying if alive_key(node) in asked}
        self._dying -= looked_after
        if lost := {node for node in looked_after if alive_key(node) not in changed}:
            leader.lose(now_ns, lost, "lost the connection to the others")
        if gone := gone - self._dying:
            self._dying |= gone
            known: dict[str, bytes | None] = {beat_key(node): self._beats.get(node) for node in gone}
            self.effects.append(Look(known | {alive_key(node): None for node in gone}))


def _beat(value: bytes | None) -> Beat | None:
    try:
        return decode(value, Beat) if value is not None else None
    except ProtocolError:
        return None
