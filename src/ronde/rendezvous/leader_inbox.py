"""The leader's inbox: it hands the leader one event at a time, and derives from the nodes' keys which nodes live. Pure.

A node whose held key is gone is dead at once if it was *seen alive*: this inbox has seen the key, or has received a
message of the node, which held its key then. The leader's sentinel is older than the inbox, and the inbox ends when the
sentinel is lost, so the store has kept all held keys since. Any other node may still be connecting: only its silence
counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from ronde.errors import ProtocolError
from ronde.rendezvous.effects import (
    Changes,
    Delete,
    Effect,
    Event,
    FindChanges,
    Forget,
    Popped,
    Probe,
    Probed,
    Values,
)
from ronde.rendezvous.failure_detectors import LeaderLoss
from ronde.rendezvous.leader import Leader
from ronde.rendezvous.membership import Node, Rules
from ronde.rendezvous.state import (
    ALIVE,
    MESSAGES,
    Heartbeat,
    JobState,
    JoinRequest,
    Message,
    alive_key,
    decode,
    heartbeat_key,
    inbox_queue,
)

__all__ = ["LeaderInbox"]

CONNECTION_LOST = "lost the connection to the others"


class LeaderInbox:
    """Events for the leader. `leader` decides; `effects` collects what must be done: take them after each call.

    `must_watch`: heartbeats were read, so it is time to watch the nodes that have arrived since the last time.
    """

    def __init__(
        self,
        rules: Rules,
        state: JobState,
        roster: Sequence[Node],
        now_ns: int,
        sentinel: Values | None = None,
    ) -> None:
        """`sentinel`: the key to read together with keys that others hold; it is intact in every event."""
        self._rules = rules
        self.leader = Leader(rules, state, roster, now_ns)
        self.effects: list[Effect] = []
        self.must_watch = False
        self._backlog: deque[Event] = deque()
        self._heartbeats: dict[str, bytes | None] = {}  # as last read, by node
        self._sentinel = sentinel or {}
        self._seen_alive: set[str] = set()
        self._unsure = set(self.leader.nodes)  # their held keys are read together with the heartbeats

    def put_event(self, event: Event) -> None:
        """Append an event for `process_events`."""
        self._backlog.append(event)

    def process_events(self, now_ns: int) -> bool:
        """Process events until none is left or the state must be written; return whether it must be written."""
        leader = self.leader
        while not leader.is_urgent:
            if self._backlog:
                self._process_event(now_ns, self._backlog.popleft())
            elif leader.state.is_open and now_ns >= leader.wake_ns:
                self._tick(now_ns)
            else:
                return False
        leader.is_urgent = False
        return True

    def note_written(self, before: JobState | None, state: JobState) -> None:
        """Note that the store has this leader's state, and delete what only the state `before` needed."""
        self.leader.state = replace(self.leader.state, version=state.version)
        is_new = before is None or before.roster != state.roster
        if before and before.roster and is_new:
            self.effects.append(Forget(before.roster.prefix))
        if is_new:
            self._forget_departed()

    def note_closed(self, state: JobState) -> None:
        """Note that the job has ended: this leader decides nothing more."""
        self.leader.state, self.leader.is_urgent = state, False
        self._forget_departed()

    def _forget_departed(self) -> None:
        if departed := self.leader.departed:
            self.effects.append(Delete(tuple(map(heartbeat_key, sorted(departed)))))
            departed.clear()

    def replace_leader(self, now_ns: int, loss: LeaderLoss) -> None:
        """Treat the predecessor, which this leader replaces, as lost."""
        self._handle_changes(now_ns, {}, {heartbeat_key(loss.leader): loss.last_heartbeat})
        if loss.is_silent:
            how = f"was silent for {self._rules.silence_ns / 1e9:g} s"
            self.leader.lose_nodes(now_ns, {loss.leader}, how, may_work=True)
        elif loss.was_seen_alive:
            self._seen_alive.add(loss.leader)
            self._read_nodes({loss.leader})

    def _tick(self, now_ns: int) -> None:
        before = self.leader.state
        if self.leader.tick(now_ns):
            self._unsure &= self.leader.nodes
            self._seen_alive &= self.leader.nodes
            self._read_nodes([*self.leader.nodes, *self.leader.leftover_workers.nodes])
            self.must_watch = True
            if addresses := self.leader.addresses_to_probe(now_ns):
                self.effects.append(Probe(addresses, all_or_none=True))
            if self.leader.state != before:
                self.leader.is_urgent = True

    def _process_event(self, now_ns: int, event: Event) -> None:
        ours = inbox_queue(self.leader.state.term)
        match event:
            case Popped(queue, values) if queue == ours:
                if len(values) > 1:
                    self._backlog.extendleft(Popped(queue, (value,)) for value in reversed(values))
                elif values:
                    self._handle_message(now_ns, values[0])
            case Changes(asked, changed):
                self._handle_changes(now_ns, asked, changed)
            case Probed(ended, True):
                self.leader.note_workers_ended(now_ns, ended)
            case Probed(ended):
                self.leader.note_agents_ended(now_ns, ended, CONNECTION_LOST)

    def _handle_message(self, now_ns: int, value: bytes) -> None:
        try:
            message: Message = decode(value, *MESSAGES)
        except ProtocolError:
            return  # another version: the node will notice when it reads the state
        sender = message.node.id if isinstance(message, JoinRequest) else message.id
        self._seen_alive.add(sender)
        if isinstance(message, JoinRequest):
            self._heartbeats.pop(sender, None)
        self.leader.handle_message(now_ns, message)

    def _read_nodes(self, nodes: Collection[str]) -> None:
        """Read heartbeats and, where unsure, held keys: if a key is gone, only a node seen alive by now is lost."""
        look: dict[str, bytes | None] = {heartbeat_key(node): self._heartbeats.get(node) for node in nodes}
        unsure = self._unsure.intersection(nodes)
        look |= {alive_key(node): ALIVE if node in self._seen_alive else None for node in unsure}
        self.effects.append(FindChanges({**look, **self._sentinel}))

    def _handle_changes(self, now_ns: int, asked: Values, changed: Values) -> None:
        heartbeats: dict[str, Heartbeat | None] = {}
        shown: set[str] = set()
        vanished: set[str] = set()
        for key, value in changed.items():
            kind, _, node = key.partition("/")
            if kind == "heartbeat":
                self._heartbeats[node] = value
                heartbeats[node] = _decode_heartbeat(value)
            elif not asked and kind == "alive" and node in self.leader.nodes:
                shown.add(node)
            elif (
                not asked and kind == "alive" and value is None and node in self.leader.leftover_workers.nodes
            ):
                vanished.add(node)
        if addresses := self.leader.quorum.meeting_addresses(vanished):
            self.effects.append(Probe(addresses, is_late=True))
        if shown:  # a watch may report old values, and a node may have left a last heartbeat: read both
            self._unsure |= shown
            self._read_nodes(shown)
        asked_of = {key.partition("/")[2] for key in asked if key.startswith("heartbeat/")}
        if heartbeats or asked_of:
            self.leader.note_heartbeats(now_ns, heartbeats, asked_of)
        held = {key: changed.get(key, known) for key, known in asked.items() if key.startswith("alive/")}
        there = {key.partition("/")[2] for key, value in held.items() if value is not None}
        self._seen_alive |= there
        self._unsure -= there
        self.leader.note_present(now_ns, there)
        lost = {
            key.partition("/")[2] for key, value in held.items() if value is None and asked[key] is not None
        }
        if lost:
            self.leader.lose_nodes(now_ns, lost, CONNECTION_LOST, may_work=True)
            if addresses := self.leader.quorum.meeting_addresses(lost):
                self.effects.append(Probe(addresses))


def _decode_heartbeat(value: bytes | None) -> Heartbeat | None:
    try:
        return decode(value, Heartbeat) if value is not None else None
    except ProtocolError:
        return None
