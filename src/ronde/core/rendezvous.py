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
5. A store may lose its memory, or be replaced by another one. Then whoever knows more than the store claims to lead,
   with all that it knows; so what is known by most of all wins, and the job goes on from there.
6. What the shell is asked to do, it does in order, and doing it twice does no harm. When something may not have been
   done, the shell says so (`moved`): then everything begins again from what is in the store.

The shell passes in what happens (`step`), does what comes back, and calls with `Tick` at `wake_ns`.
"""

from __future__ import annotations

from collections.abc import Collection
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
from ronde.core.rendezvous_office import Office
from ronde.core.rendezvous_state import (
    ALIVE,
    STATE,
    Beat,
    Phase,
    RosterKey,
    Rules,
    State,
    alive_key,
    beat_key,
    inbox,
)
from ronde.core.rendezvous_text import decode_roster, decode_state, encode, encode_roster
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
        self._office: Office | None = None  # while this node leads
        self._writing: bytes | None = None  # the state that a Compare is to make true
        self._expected: State | None = None  # what it replaces
        self._claiming = False  # that write makes this node the leader
        self._silent_leader = self._lost_leader = ""  # whose place it takes
        self._is_new = False  # in office
        self._watched: dict[str, bytes | None] = {}
        self._roster_key: RosterKey | None = None  # that of `_roster`
        self.roster: tuple[Node, ...] = ()  # of the last round that this node has read of, by group rank
        self._draft: tuple[RosterKey, tuple[Node, ...]] | None = None  # a roster that is being written
        self._gone: set[str] = set()  # nodes that died with the last store
        self._has_restored = False  # whether the state was restored by us: who is not there may be on its way
        self._may_wait = False  # for others who know more
        self._is_settling = False  # whether the store is the one that we know is not clear
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
            self._arrive(now_ns)
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
        self._office = None
        self._member.give_up(reason)
        return self._take()

    def moved(self, now_ns: int, gone: Collection[str] = (), forget: str = "") -> list[Effect]:
        """All operations under way are lost; the store may have lost its memory, or be another one.

        `gone`: nodes that died with it; others may be on their way. `forget`: why what we know is not of this job.
        """
        if forget:
            self._member.forget(forget)
            self._state, self._raw, self._roster_key, self.roster = None, b"", None, ()
        self._step_down()
        self._gone = set(gone)
        self._may_wait = True
        self._writing, self._claiming, self._is_judging = None, False, False
        self._leader_lost = self._leader_silent = False
        self._watched = {}
        self._is_settling = True
        self._arrive(now_ns)
        return self._take()

    def _arrive(self, now_ns: int) -> None:
        self._leader_seen_ns = self._heard_ns = now_ns
        self._effects.append(Hold(alive_key(self._id), ALIVE))
        self._beat(now_ns)
        self._effects.append(Look({STATE: None}))

    # What happens

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait, as far as this one knows."""
        return self._member.num_waiting

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return self._office is not None

    @property
    def has_joined(self) -> bool:
        """Whether `join` has been called: before that there is nothing to do."""
        return self._id != ""

    @property
    def others(self) -> list[str]:
        """The ids of the nodes that this one knows of; the leader knows of all."""
        known = self._office.leader.nodes if self._office else [node.id for node in self.roster]
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
        if self._office and self._is_open():
            if self._writing is None:
                times.append(self._office.leader.wake_ns)
        elif self._is_open() and not self._is_judging and not self._leader_lost:
            times.append(self._leader_seen_ns + self._silence_ns)
        return min(times)

    @property
    def _silence_ns(self) -> int:
        return self._rules.missing_beats * self._rules.heartbeat_ns

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return what to do about the event."""
        self._heard_ns = self._heard_ns if isinstance(event, Tick) else now_ns
        match event:
            case Tick():
                self._tick(now_ns)
            case Seen(asked, changed):
                self._see(now_ns, asked, changed)
            case Compared(value):
                self._compared(now_ns, value)
            case Popped():
                if self._office:
                    self._office.put(event)
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
            if self._is_settling and self._writing is None:
                self._effects.append(Look({STATE: None}))
        self._member.tick(now_ns)
        if now_ns - self._heard_ns >= self._silence_ns:
            self._member.cut_off(f"the store has not answered for {self._silence_ns / 1e9:g} s")
        is_due = now_ns >= self._leader_seen_ns + self._silence_ns
        if self._state and not self._office and self._is_open() and is_due and not self._is_judging:
            self._is_judging = True
            alive, beat = alive_key(self._state.leader), beat_key(self._state.leader)
            self._effects.append(Look({alive: ALIVE, beat: self._watched.get(beat)}))

    def _beat(self, now_ns: int) -> None:
        self._count += 1
        self._beat_ns = now_ns + self._rules.heartbeat_ns
        self._effects.append(Set({beat_key(self._id): encode(Beat(self._count, self._succeeded))}))

    def _is_open(self) -> bool:
        return self._state is not None and self._state.phase in (Phase.FORMING, Phase.RUNNING)

    # Looking

    def _look_for_roster(self) -> None:
        if self._state and self._state.roster:
            self._effects.append(Look(dict.fromkeys(self._state.roster.keys)))

    def _see(self, now_ns: int, asked: Values, changed: Values) -> None:
        if not asked:
            self._watched |= {key: value for key, value in changed.items() if key in self._watched}
        if STATE in asked and self._is_settling:
            self._settle(now_ns, changed.get(STATE) or b"")
        elif STATE in asked and STATE not in changed and not self._raw:
            self._found()
        elif value := changed.get(STATE):
            self._see_state(now_ns, value)
        if self._office:
            self._office.put(Seen(asked, changed))
        elif self._state:
            self._see_leader(now_ns, self._state.leader, asked, changed)
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
        # If our own key is missing, the store has been away: silence will decide
        is_gone = (
            self._watched.get(alive, ALIVE) is None and self._watched.get(alive_key(self._id)) is not None
        )
        if (is_gone and changed.keys() & {alive, alive_key(self._id)}) or is_silent:
            self._leader_lost = True
            self._leader_silent = is_silent
            self._claim()

    def _see_state(self, now_ns: int, raw: bytes) -> None:
        if raw == self._raw:
            return
        state, before = self._decoded(raw), self._state
        if state is None or (before and state.version <= before.version):
            return  # an older one that took longer
        if self._office and state.leader != self._id:
            self._step_down()
        self._state, self._raw = state, raw
        if self._draft and self._draft[0] == state.roster:
            self._roster_key, self.roster = self._draft
        if before is None or before.leader != state.leader or before.term != state.term:
            self._leader_seen_ns, self._is_judging = now_ns, False
            self._leader_lost = self._leader_silent = False
        self._member.see(state, self.roster if state.roster == self._roster_key else None)
        self._renew_watch()

    def _see_roster(self, now_ns: int, changed: Values) -> None:
        state = self._state
        parts = [changed.get(key) for key in state.roster.keys] if state and state.roster else [None]
        if state is None or None in parts:
            return  # it belongs to another state
        try:
            roster = decode_roster(tuple(part for part in parts if part))
        except ProtocolError as error:
            self._member.give_up(str(error))
            return
        self._roster_key, self.roster = state.roster, roster
        self._member.see(state, roster)
        if state.leader == self._id and not self._office and not self._claiming:
            self._take_office(now_ns)

    def _renew_watch(self) -> None:
        """Watch the state, and the leader's life or, as the leader, everybody's."""
        if self._state is None:
            return
        watched: dict[str, bytes | None] = {STATE: self._raw}
        if self._office:
            # Who is not there when we begin may be on its way, if the store has been away
            known = {} if self._is_new else self._watched
            new = None if self._is_new else ALIVE
            self._is_new = False
            for key in map(alive_key, self._office.leader.nodes):
                watched[key] = known.get(key, new)
            watched |= {alive_key(node): new for node in self._office.leader.unwatched}
            self._office.leader.unwatched.clear()
        elif self._state.leader != self._id and self._is_open():
            beat = beat_key(self._state.leader)
            watched |= {alive_key(self._state.leader): ALIVE, beat: self._watched.get(beat)}
            watched[alive_key(self._id)] = ALIVE
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
            self._lost_leader = "" if self._leader_silent or state.leader == self._id else state.leader
            self._compare(replace(state, leader=self._id, term=state.term + 1, version=state.version + 1))
            self._claiming = True

    def _settle(self, now_ns: int, raw: bytes) -> None:
        """Is this the state as we know it, a newer one, or has the store forgotten something?"""
        mine, theirs = self._state, self._decoded(raw) if raw else None
        may_wait, self._may_wait = self._may_wait, False
        is_known = theirs and (mine is None or raw == self._raw or theirs.version > mine.version)
        self._is_settling = not is_known  # until it is written, by us or somebody who knows more
        if theirs and is_known:
            self._see_state(now_ns, raw)
            self._member.say_again()
            self._renew_watch()
            if theirs.leader == self._id:  # we are not any more: what was under way is lost
                self._leader_lost = True
                self._claim()
        elif mine and mine.roster == self._roster_key and (mine.roster or not may_wait):
            self._restore(mine, theirs, raw)
        elif not mine and not may_wait:
            self._is_settling = False
            self._found()

    def _restore(self, mine: State, theirs: State | None, raw: bytes) -> None:
        """Write what we know into a store that knows less."""
        if mine.roster:
            self._effects.append(Set(dict(zip(mine.roster.keys, encode_roster(self.roster)))))
        self._raw = raw
        self._compare(mine.restored(self._id, theirs))
        self._claiming = self._has_restored = True

    def _decoded(self, raw: bytes) -> State | None:
        try:
            return decode_state(raw)
        except ProtocolError as error:
            self._member.give_up(str(error))
            return None

    def _compare(self, state: State) -> None:
        self._writing, self._expected = encode(state), self._state
        self._effects.append(Compare(self._raw, self._writing))

    def _compared(self, now_ns: int, value: bytes) -> None:
        written, self._writing = self._writing, None
        has_claimed, self._claiming = self._claiming, False
        before, self._expected = self._expected, None
        was_settling, self._is_settling = self._is_settling, False
        if was_settling and value != written:
            self._has_restored = False
            self._settle(now_ns, value)
            return
        self._see_state(now_ns, value)
        state = self._state
        if value != written or state is None or self._raw != written:
            self._step_down()
            if self._leader_silent:  # it has written: it lives
                self._leader_lost, self._leader_silent, self._leader_seen_ns = False, False, now_ns
            elif self._leader_lost:
                self._claim()
        elif not has_claimed:
            if self._office:
                self._office.leader.state = replace(self._office.leader.state, version=state.version)
                self._clear_up(before, state)
        elif state.roster is None or state.roster == self._roster_key:
            self._take_office(now_ns)
        else:
            self._look_for_roster()

    def _take_office(self, now_ns: int) -> None:
        state = self._state
        assert state is not None
        self._is_new = True
        office = self._office = Office(self._rules, state, self.roster if state.roster else (), now_ns)
        self._effects.append(Pop(inbox(state.term)))
        if state.term > 1:
            self._effects.append(Forget(inbox(state.term - 1)))
        if self._silent_leader:
            beat, how = beat_key(self._silent_leader), f"was silent for {self._silence_ns / 1e9:g} s"
            office.succeed(now_ns, self._silent_leader, self._watched.get(beat), how)
            self._silent_leader = ""
        elif self._lost_leader:
            office.put(Seen({}, {alive_key(self._lost_leader): None}))
            self._lost_leader = ""
        if self._has_restored and self._gone:
            office.leader.lose(now_ns, self._gone, "was lost, and the store with it")
        self._has_restored = False
        self._renew_watch()

    def _step_down(self) -> None:
        if self._office:
            self._office = None
            self._effects.append(Pop(None))

    # Leading

    def _lead(self, now_ns: int) -> None:
        """Let the leader go on, until it has something to write."""
        office = self._office
        if office is None or self._state is None:
            return
        if self._writing is None:
            has_decided = office.work(now_ns)
            self._effects += office.effects
            office.effects.clear()
            if has_decided:
                self._write(office.leader, self._state)
        new = len(office.leader.unwatched)
        if new and (office.must_watch or 4 * new > len(self._watched)):
            self._renew_watch()  # not at once for each who comes, because a watch names all that are watched
        office.must_watch = False

    def _write(self, leader: Leader, state: State) -> None:
        key = leader.state.roster
        if key and key != state.roster:
            self._draft = key, leader.roster  # ours once the state names it
            self._renew_watch()
            self._effects.append(Set(dict(zip(key.keys, encode_roster(leader.roster)))))
        self._compare(replace(leader.state, version=state.version + 1))

    def _clear_up(self, before: State | None, state: State) -> None:
        """A state has been written: what the one before needed may go."""
        if before and before.roster and before.roster != state.roster:
            self._effects.append(Forget(before.roster.prefix))
