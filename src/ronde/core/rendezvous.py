"""One node's part in the rendezvous of its job: a member always, the leader sometimes. Pure.

All that the nodes share is a store. One key is the `State`; every node watches it. A node that wants something puts a
message into the leader's inbox; the leader decides (`core/rendezvous_leader`) and writes the next state, which the
members understand (`core/rendezvous_member`). So a round costs a few messages per node, however many there are.

Rules

1. The state is changed by compare-and-set only, and no two states are equal. Whoever believes to lead and does not,
   learns of it by the value that comes back, and stops.
2. The leader looks at no further news while a write is under way: it builds on nothing that others cannot see.
3. A leader whose held key is gone, or that is silent for `missing_beats` heartbeats, is replaced by whoever is first to
   write a state with the next term. Each term has an inbox of its own, and everybody says again what is not heeded.
4. No clock value travels. Silence is judged by each node's own clock, and only after looking once more.
5. What the shell is asked to do, it does in order and until it works: doing it twice does no harm. The exception is
   taking messages out of the inbox: if that fails, some may be lost, so the leader begins a new term.

The shell passes in what happens (`step`), does what comes back, and calls with `Tick` at `wake_ns`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ronde.core.rendezvous_effects import (
    Compare,
    Compared,
    Effect,
    Event,
    Forget,
    Hold,
    Look,
    Pop,
    PopFailed,
    Popped,
    Push,
    Seen,
    Set,
    Tell,
    Tick,
    Values,
    Watch,
)
from ronde.core.rendezvous_leader import Leader
from ronde.core.rendezvous_member import Member
from ronde.core.rendezvous_state import (
    ALIVE,
    STATE,
    Beat,
    EndJob,
    Fail,
    Join,
    Leave,
    Message,
    Phase,
    RosterKey,
    Rules,
    State,
    Succeed,
    alive_key,
    beat_key,
    inbox,
)
from ronde.core.rendezvous_text import decode, decode_roster, decode_state, encode, encode_roster
from ronde.core.round import Budget, Failure, Node
from ronde.errors import ProtocolError

__all__ = ["Participant", "Rules"]


class Participant:
    """The machine of one node. Every method takes the time, in nanoseconds of any monotonic clock, and returns what is
    to be done. `join` comes first.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._member = Member(rules)
        self._id = ""
        self._state: State | None = None
        self._raw = b""  # the state as it was read
        self._leader: Leader | None = None  # while this node leads
        self._writing: bytes | None = None  # the state that a Compare is to make true
        self._expected: State | None = None  # what it replaces
        self._claiming = False  # that write makes this node the leader
        self._silent_leader = ""  # whose place it takes
        self._backlog: deque[Event] = deque()  # for the leader
        self._watched: dict[str, bytes | None] = {}
        self._roster_key: RosterKey | None = None  # that of `_roster`
        self._roster: tuple[Node, ...] = ()
        self._roster_parts: dict[str, bytes] = {}
        self._beats: dict[str, bytes | None] = {}  # as they were read last, by node
        self._dying: set[str] = set()  # nodes whose keys have gone, and whose last words are being read
        self._count = 0
        self._succeeded = -1
        self._beat_ns = 0  # when our heart beats next
        self._leader_seen_ns = 0  # when the leader last showed that it lives
        self._leader_lost = False
        self._leader_silent = False  # is how it was lost
        self._is_judging = False  # the leader: it is looked at once more
        self._heard_ns = 0  # when the store last answered
        self._effects: list[Effect] = []

    # What the agent asks for

    def join(self, now_ns: int, node: Node, budget: Budget) -> list[Effect]:
        """Take part in the next round."""
        is_first = not self._id
        self._id = node.id
        self._member.join(now_ns, node, budget)
        if is_first:
            self._effects.append(Hold(alive_key(node.id), ALIVE))
            self._beat(now_ns)
            self._look_for_state()
            self._leader_seen_ns = self._heard_ns = now_ns
        elif self._leader_lost:
            self._claim()
        return self._take()

    def fail(self, failure: Failure) -> list[Effect]:
        """A worker of this node has failed."""
        self._member.fail(failure)
        return self._take()

    def succeed(self, now_ns: int) -> list[Effect]:
        """All workers of this node have succeeded."""
        self._succeeded = self._member.succeed()
        self._beat(now_ns)
        return self._take()

    def leave(self, reason: str) -> list[Effect]:
        """Go away in good order."""
        self._member.leave(reason)
        return self._take()

    def end_job(self, reason: str) -> list[Effect]:
        """End the job for all."""
        self._member.end_job(reason)
        return self._take()

    def give_up(self, reason: str) -> list[Effect]:
        """The store is lost for good."""
        self._leader = None
        self._member.give_up(reason)
        return self._take()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait, as far as this one knows."""
        return self._member.num_waiting

    # What happens

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return self._leader is not None

    @property
    def has_joined(self) -> bool:
        """Whether `join` has been called: before that there is nothing to do."""
        return self._id != ""

    @property
    def others(self) -> list[str]:
        """The ids of the nodes that this one knows of; the leader knows of all."""
        known = self._leader.nodes if self._leader else [node.id for node in self._roster]
        return [node for node in known if node != self._id]

    @property
    def state(self) -> State | None:
        """The state as it was seen last."""
        return self._state

    @property
    def wake_ns(self) -> int:
        """When the next `Tick` is due."""
        times = [self._beat_ns]
        if self._member.wake_ns is not None:
            times.append(self._member.wake_ns)
        if self._leader and self._is_open():
            if self._writing is None:
                times.append(self._leader.wake_ns)
        elif self._is_open() and not self._is_judging and not self._leader_lost:
            times.append(self._leader_seen_ns + self._silence_ns)
        return min(times)

    @property
    def _silence_ns(self) -> int:
        return self._rules.missing_beats * self._rules.heartbeat_ns

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return what to do about the event."""
        if not isinstance(event, Tick):
            self._heard_ns = now_ns
        match event:
            case Tick():
                self._tick(now_ns)
            case Seen(asked, changed):
                self._see(now_ns, asked, changed)
            case Compared(value):
                self._compared(now_ns, value)
            case Popped() | PopFailed():
                self._backlog.append(event)
        self._lead(now_ns)
        return self._take()

    def _take(self) -> list[Effect]:
        """Everything that is to be done, with what the member has to say and tell."""
        if self._member.wants_roster:
            self._member.wants_roster = False
            self._look_for_roster()
        if self._state:
            queue = inbox(self._state.term)
            self._effects += [Push(queue, encode(message)) for message in self._member.says]
            self._member.says.clear()
        self._effects += map(Tell, self._member.tells)
        self._member.tells.clear()
        effects, self._effects = self._effects, []
        return effects

    # Time

    def _tick(self, now_ns: int) -> None:
        if now_ns - self.wake_ns > self._rules.heartbeat_ns:  # we overslept, and know nothing of the others
            self._leader_seen_ns = self._heard_ns = now_ns
        if now_ns >= self._beat_ns:
            self._beat(now_ns)
        self._member.tick(now_ns)
        if now_ns - self._heard_ns >= self._silence_ns:
            self._member.cut_off(f"the store has not answered for {self._silence_ns / 1e9:g} s")
        is_due = now_ns >= self._leader_seen_ns + self._silence_ns
        if self._state and not self._leader and self._is_open() and is_due and not self._is_judging:
            self._is_judging = True
            leader = self._state.leader
            known = self._watched.get(beat_key(leader))
            self._effects.append(Look({alive_key(leader): ALIVE, beat_key(leader): known}))

    def _beat(self, now_ns: int) -> None:
        self._count += 1
        self._beat_ns = now_ns + self._rules.heartbeat_ns
        self._effects.append(Set({beat_key(self._id): encode(Beat(self._count, self._succeeded))}))

    def _is_open(self) -> bool:
        return self._state is not None and self._state.phase in (Phase.FORMING, Phase.RUNNING)

    # Looking

    def _look_for_state(self) -> None:
        self._effects.append(Look({STATE: self._raw or None}))

    def _look_for_roster(self) -> None:
        if self._state and self._state.roster:
            self._roster_parts = {}
            self._effects += [Look({key: None}) for key in self._state.roster.keys]

    def _see(self, now_ns: int, asked: Values, changed: Values) -> None:
        if not asked:
            self._watched |= {key: value for key, value in changed.items() if key in self._watched}
        if STATE in asked and STATE not in changed and not self._raw:
            self._found()
        if value := changed.get(STATE):
            self._see_state(now_ns, value)
        if self._state and not self._leader:
            self._see_leader(now_ns, self._state.leader, asked, changed)
        if self._leader:
            self._backlog.append(Seen(asked, changed))
        if any(key.startswith("roster/") for key in changed):
            self._see_roster(now_ns, changed)

    def _see_leader(self, now_ns: int, leader: str, asked: Values, changed: Values) -> None:
        beat, alive = beat_key(leader), alive_key(leader)
        if beat in changed and changed[beat] is not None:
            self._leader_seen_ns = now_ns
            if beat in self._watched:
                self._watched[beat] = changed[beat]
        is_silent = self._is_judging and beat in asked and beat not in changed
        if beat in asked:
            self._is_judging = False
        if (alive in changed and changed[alive] is None) or is_silent:
            self._leader_lost = True
            self._leader_silent = is_silent
            self._claim()

    def _see_state(self, now_ns: int, raw: bytes) -> None:
        if raw == self._raw:
            return
        try:
            state = decode_state(raw)
        except ProtocolError as error:
            self._member.give_up(str(error))
            return
        before = self._state
        if before and state.version <= before.version:
            return  # an older one that took longer
        if self._leader and state.leader != self._id:
            self._step_down()
        self._state, self._raw = state, raw
        if before is None or before.leader != state.leader or before.term != state.term:
            self._leader_seen_ns, self._is_judging = now_ns, False
            self._leader_lost = self._leader_silent = False
        self._member.see(state, self._roster if state.roster == self._roster_key else None)
        self._renew_watch()

    def _see_roster(self, now_ns: int, changed: Values) -> None:
        state = self._state
        if state is None or state.roster is None:
            return
        self._roster_parts |= {key: value for key, value in changed.items() if value is not None}
        if not all(key in self._roster_parts for key in state.roster.keys):
            return
        try:
            roster = decode_roster(tuple(self._roster_parts[key] for key in state.roster.keys))
        except ProtocolError as error:
            self._member.give_up(str(error))
            return
        self._roster_key, self._roster, self._roster_parts = state.roster, roster, {}
        self._member.see(state, roster)
        if state.leader == self._id and not self._leader and not self._claiming:
            self._take_office(now_ns)

    def _renew_watch(self) -> None:
        """Watch the state, and the leader's life or, as the leader, everybody's."""
        if self._state is None:
            return
        watched: dict[str, bytes | None] = {STATE: self._raw}
        if self._leader:
            watched |= {alive_key(node): ALIVE for node in self._leader.nodes}
            self._leader.unwatched.clear()
        elif self._state.leader != self._id and self._is_open():
            alive, beat = alive_key(self._state.leader), beat_key(self._state.leader)
            watched |= {alive: ALIVE, beat: self._watched.get(beat)}
        if watched.keys() != self._watched.keys():
            self._watched = watched
            self._effects.append(Watch(dict(watched)))

    # Becoming the leader

    def _found(self) -> None:
        """There is no state: make the first one."""
        if self._member.terms and self._writing is None:
            self._compare(State(self._member.terms, self._id))
            self._claiming = True

    def _claim(self) -> None:
        """The leader is gone: be the first to say so."""
        state = self._state
        if state and self._is_open() and self._member.may_lead and self._writing is None:
            self._silent_leader = state.leader if self._leader_silent else ""
            self._compare(replace(state, leader=self._id, term=state.term + 1, version=state.version + 1))
            self._claiming = True

    def _compare(self, state: State) -> None:
        self._writing, self._expected = encode(state), self._state
        self._effects.append(Compare(self._raw, self._writing))

    def _compared(self, now_ns: int, value: bytes) -> None:
        written, self._writing = self._writing, None
        has_claimed, self._claiming = self._claiming, False
        before, self._expected = self._expected, None
        self._see_state(now_ns, value)
        state = self._state
        if value != written or state is None or self._raw != written:
            self._step_down()
            if self._leader_silent:  # it has written: it lives
                self._leader_lost, self._leader_silent, self._leader_seen_ns = False, False, now_ns
            elif self._leader_lost:
                self._claim()
        elif not has_claimed:
            if self._leader:
                self._leader.state = replace(self._leader.state, version=state.version)
                self._clear_up(before, state)
        elif state.roster is None or state.roster == self._roster_key:
            self._take_office(now_ns)
        else:
            self._look_for_roster()

    def _take_office(self, now_ns: int) -> None:
        state = self._state
        assert state is not None
        leader = self._leader = Leader(self._rules, state, self._roster if state.roster else (), now_ns)
        self._beats = {}
        self._dying = set()
        self._backlog.clear()
        self._effects.append(Pop(inbox(state.term)))
        if state.term > 1:
            self._effects.append(Forget(inbox(state.term - 1)))
        if self._silent_leader:
            beat = self._watched.get(beat_key(self._silent_leader))
            self._see_nodes(now_ns, leader, {}, {beat_key(self._silent_leader): beat})
            leader.lose(now_ns, {self._silent_leader}, f"was silent for {self._silence_ns / 1e9:g} s")
            self._silent_leader = ""
        self._renew_watch()

    def _step_down(self) -> None:
        if self._leader:
            self._leader = None
            self._backlog.clear()
            self._effects.append(Pop(None))

    # Leading

    def _lead(self, now_ns: int) -> None:
        """Give the leader what has happened, piece by piece, until it has something to write."""
        leader = self._leader
        if leader is None:
            return
        while self._writing is None and self._leader is leader:
            if leader.is_urgent:
                self._write(leader)
            elif self._backlog:
                self._pass_on(now_ns, leader, self._backlog.popleft())
            elif self._is_open() and now_ns >= leader.wake_ns:
                self._tick_leader(now_ns, leader)
            else:
                break
        self._watch_more(leader)

    def _tick_leader(self, now_ns: int, leader: Leader) -> None:
        if leader.tick(now_ns):
            self._effects.append(Look({beat_key(node): self._beats.get(node) for node in leader.nodes}))
            self._watch_more(leader, is_time=True)
            if self._state and replace(leader.state, version=self._state.version) != self._state:
                leader.is_urgent = True

    def _write(self, leader: Leader) -> None:
        assert self._state is not None
        leader.is_urgent = False
        key = leader.state.roster
        if key and key != self._state.roster:
            self._roster_key, self._roster = key, leader.roster
            self._watch_more(leader, is_time=True)
            self._effects.append(Set(dict(zip(key.keys, encode_roster(leader.roster)))))
        self._compare(replace(leader.state, version=self._state.version + 1))

    def _pass_on(self, now_ns: int, leader: Leader, event: Event) -> None:
        assert self._state is not None
        match event:
            case Popped(queue, values) if queue == inbox(self._state.term):
                if len(values) > 1:
                    self._backlog.extendleft(Popped(queue, (value,)) for value in reversed(values))
                elif values:
                    self._hear(now_ns, leader, values[0])
            case PopFailed(queue) if queue == inbox(self._state.term):
                leader.ask_again()
            case Seen(asked, changed):
                self._see_nodes(now_ns, leader, asked, changed)

    def _hear(self, now_ns: int, leader: Leader, value: bytes) -> None:
        try:
            message: Message = decode(value, Join, Fail, Succeed, Leave, EndJob)  # type: ignore[assignment]
        except ProtocolError:
            return  # of another version: that node learns of it by our state
        if isinstance(message, Join):
            self._beats.pop(message.node.id, None)
        leader.hear(now_ns, message)

    def _see_nodes(self, now_ns: int, leader: Leader, asked: Values, changed: Values) -> None:
        beats: dict[str, Beat | None] = {}
        gone: set[str] = set()
        for key, value in changed.items():
            kind, _, node = key.partition("/")
            if kind == "beat":
                self._beats[node] = value
                beats[node] = decode(value, Beat) if value is not None else None
            elif kind == "alive" and value is None and node in leader.nodes:
                gone.add(node)
        asked_of = {key.partition("/")[2] for key in asked if key.startswith("beat/")}
        if beats or asked_of:
            leader.hear_beats(now_ns, beats, asked_of)
        # Who has gone may have said something last, and may have come back
        looked_after = {node for node in self._dying if alive_key(node) in asked}
        self._dying -= looked_after
        lost = {node for node in looked_after if alive_key(node) not in changed}
        if lost:
            leader.lose(now_ns, lost, "lost the connection to the others")
        if gone := gone - self._dying:
            self._dying |= gone
            known: dict[str, bytes | None] = {beat_key(node): self._beats.get(node) for node in gone}
            self._effects.append(Look(known | {alive_key(node): None for node in gone}))

    def _watch_more(self, leader: Leader, is_time: bool = False) -> None:
        """Watch those who came since; not at once for each of them, because a watch names all that are watched."""
        new = len(leader.unwatched)
        if new and (is_time or 4 * new > len(self._watched)):
            self._renew_watch()

    def _clear_up(self, before: State | None, state: State) -> None:
        """A state has been written: what the one before needed may go."""
        if before is None:
            return
        if before.term != state.term:
            self._effects += [Pop(inbox(state.term)), Forget(inbox(before.term))]
        if before.roster and before.roster != state.roster:
            self._effects.append(Forget(before.roster.prefix))
