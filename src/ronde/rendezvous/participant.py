"""One node's part in the rendezvous of its job: a member always, the leader sometimes. Pure.

The nodes share nothing but a store. One key is the `JobState`, which every node watches. A node puts its requests into
the leader's inbox; the leader decides (`leader`) and writes the next state, and the members act on it (`member`). So a
round costs a few messages per node, however many nodes there are.

Rules

1. Nodes change the state by compare-and-set only (`state`). A node that wrongly believes to lead learns so from
   the value that comes back, and stops.
2. The leader processes no event while a write is under way: it builds on nothing that others cannot see.
3. When the leader is lost (`failure_detectors`), the first node to write a state with the next term replaces it. Each
   term has a separate inbox, and members repeat the requests that have had no effect.
4. No clock value travels. Each node judges silence by its own clock, and only after one more reading.
5. A store may lose its data, or another store may take its place (`state`). Then a node that knows more than
   the store claims to lead with its own state. So the most recent state wins, and the job goes on.
6. A store may also come back without the held keys only. A node that notices this (`liveness`) ignores held keys and
   starts over from the state in the store; a leader does so in a new term.
7. A node that ends the job writes that itself, by compare-and-set until it succeeds, with or without a leader.
8. The shell carries out effects in order, and repeating them is harmless. If effects may have been lost, the shell
   calls `enter_store`, and the node starts over, too.

The shell passes events to `step`, carries out the effects that it returns, and passes `Tick` at `wake_ns`. All pure
machines have this convention: time goes in as integer nanoseconds, effects come out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from ronde.errors import ProtocolError
from ronde.rendezvous.effects import (
    Changes,
    Compared,
    Effect,
    Event,
    FindChanges,
    Forget,
    NotifyAgent,
    Pop,
    Popped,
    Probed,
    Push,
    Stored,
    Tick,
    Values,
    Watch,
)
from ronde.rendezvous.failure_detectors import LeaderDetector, LeaderLoss, StoreSilence
from ronde.rendezvous.leader_inbox import LeaderInbox
from ronde.rendezvous.liveness import Liveness
from ronde.rendezvous.member import Member
from ronde.rendezvous.membership import Budget, Failure, Node, Rules
from ronde.rendezvous.state import (
    ALIVE,
    STATE,
    Finding,
    JobState,
    StateReplica,
    StoreIdentity,
    alive_key,
    decode_state,
    encode,
    inbox_queue,
)

__all__ = ["Participant"]


class _Claim(NamedTuple):
    """A claim to lead: in place of a lost `predecessor`, or at another store, with whose loss some nodes are `gone`."""

    predecessor: LeaderLoss | None = None
    gone: frozenset[str] = frozenset()


class Participant:
    """One node. `now_ns` comes from one monotonic clock in all calls; methods return the effects to carry out.

    Call `join` first. `store_identity` and `store_silence`: the node's knowledge of the store, for the shell.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._member = Member(rules)
        self._liveness = Liveness(rules)
        self._leader_detector = LeaderDetector(rules)
        self._replica = StateReplica()
        self.store_identity = StoreIdentity(self._replica)
        self._inbox: LeaderInbox | None = None  # while this node leads
        self._claim: _Claim | None = None  # while its state is being written, or its roster is being read
        self._watched: dict[str, bytes | None] = {}
        self._gone: frozenset[str] = frozenset()  # nodes that died with the last store
        self.store_silence = StoreSilence(rules)
        self._effects: list[Effect] = []

    # Requests of the agent

    def join(self, now_ns: int, node: Node, budget: Budget) -> list[Effect]:
        """Ask for a place in the next round."""
        is_first = not self._liveness.id
        self._liveness.id = node.id
        if not node.has_workers:
            self._liveness.lease.begin_lease(now_ns)
        self._member.join(now_ns, node, budget)
        if is_first:
            self._leader_detector.renew_leader(now_ns)
            self._introduce_node(now_ns)
        elif self._leader_detector.loss:
            self._take_over()
        return self._take_effects()

    def update_node(self, node: Node) -> list[Effect]:
        """Replace this node's description in its request for a place, if it has one."""
        self._member.update_node(node)
        return self._take_effects()

    def fail(self, failure: Failure) -> list[Effect]:
        """Report a failed worker of this node."""
        self._member.fail(failure)
        return self._take_effects()

    def request_change(self, reason: str) -> list[Effect]:
        """Ask for the end of this round, without a failure."""
        self._member.request_change(reason)
        return self._take_effects()

    def succeed(self, now_ns: int) -> list[Effect]:
        """Report that all workers of this node have succeeded."""
        self._effects += self._liveness.send_heartbeat(now_ns, self._member.succeed())
        return self._take_effects()

    def note_awaited_exit(self, now_ns: int, awaits_exit: bool) -> list[Effect]:
        """Note whether a worker of this node has left the other ranks and still runs."""
        self._effects += self._liveness.send_heartbeat(now_ns, awaits_exit=awaits_exit)
        return self._take_effects()

    def leave(self, reason: str, ends_within_ns: int = 0) -> list[Effect]:
        """Leave the job. The workers of this node end within that time."""
        self._member.leave(reason, ends_within_ns)
        return self._take_effects()

    def end_job(self, reason: str) -> list[Effect]:
        """End the job for all nodes, unless it has gone on without this one."""
        self._member.end_job(reason)
        self._end_job()
        return self._take_effects()

    def give_up(self, reason: str) -> list[Effect]:
        """Stop taking part: the store is lost for good."""
        self._inbox = None
        self._member.give_up(reason)
        return self._take_effects()

    def lose_store(self, broke_now: bool) -> None:
        """Note that there is no store until `enter_store`. `broke_now`: its process has ended just now."""
        self._member.lose_store(broke_now)
        self.store_identity.is_unclear = True

    def enter_store(
        self, now_ns: int, gone: Collection[str] = (), forget: str = "", elsewhere: bool = False
    ) -> list[Effect]:
        """Start over at a store that may have lost its data, or is another one. All operations under way are lost.

        `gone`: nodes that died with the last store; others may be on their way. `elsewhere`: this is another store, and
        the last one may live. `forget`: if not empty, why this node must forget the state that it knows.
        """
        self._member.enter_store(now_ns, elsewhere)
        if forget:
            self._member.forget_job(forget)
            self._replica = StateReplica()
            self.store_identity = StoreIdentity(self._replica)
        self.store_identity.is_elsewhere = self.store_identity.is_elsewhere or elsewhere
        self._gone = frozenset(gone)
        self._start_over(now_ns)
        return self._take_effects()

    def _start_over(self, now_ns: int) -> None:
        """Begin again from the state in the store."""
        self._effects.clear()
        self._step_down()
        self.store_identity.reset()
        self._replica.writing = self._claim = None
        self._watched = {}
        self._leader_detector.reset(now_ns)
        self.store_silence.note_return(now_ns)
        self._introduce_node(now_ns)

    def _introduce_node(self, now_ns: int) -> None:
        self.store_silence.note_answer(now_ns)
        self._effects += [*self._liveness.hold_keys(now_ns), self._read_state()]

    # Queries

    @property
    def is_leader(self) -> bool:
        """Whether this node believes to lead."""
        return self._inbox is not None

    def must_end_workers(self, now_ns: int) -> bool:
        """Return whether this node is in a round, and its lease has run out."""
        return self._member.is_working and self._liveness.lease.has_ended(now_ns)

    @property
    def is_ending(self) -> bool:
        """Whether this node is ending the job, and the others cannot know yet."""
        return self._member.is_ending

    @property
    def is_over(self) -> bool:
        """Whether this node's part in the job has ended, and it asks nothing of the store any more."""
        return self._member.is_over and not self._replica.is_open

    @property
    def has_joined(self) -> bool:
        """Whether `join` was called: before that, `wake_ns` has no value."""
        return self._liveness.id != ""

    @property
    def roster(self) -> tuple[Node, ...]:
        """The nodes of the last round whose roster this node has read, by group rank."""
        return self._replica.roster

    @property
    def others(self) -> list[str]:
        """The ids of the other nodes that this one knows; the leader knows all."""
        known = self._inbox.leader.nodes if self._inbox else [node.id for node in self.roster]
        return [node for node in known if node != self._liveness.id]

    @property
    def state(self) -> JobState | None:
        """The state as this node last read it."""
        return self._replica.state

    @property
    def wake_ns(self) -> int:
        """When the next `Tick` is due."""
        times = [self._liveness.next_heartbeat_ns, self._member.wake_ns]
        if self._replica.is_open:
            if not self._inbox:
                times.append(self._leader_detector.wake_ns)
            elif self._replica.writing is None:
                times.append(self._inbox.leader.wake_ns)
        if self._member.is_working:
            times.append(self._liveness.lease.ends_ns)
        return min(each for each in times if each is not None)

    # Events

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return the effects of the event."""
        self._member.has_lease = self._liveness.has_lease(now_ns)
        if not isinstance(event, Tick):
            self.store_silence.note_answer(now_ns)
        try:
            match event:
                case Tick():
                    self._tick(now_ns)
                case Changes(asked, changed):
                    self._handle_changes(now_ns, asked, changed)
                case Compared(value):
                    self._handle_compared(now_ns, value)
                case Stored(values):
                    self._liveness.note_stored(values)
                case Popped() | Probed():
                    if self._inbox:
                        self._inbox.put_event(event)
        except ProtocolError as error:  # written by another version, for example
            self._member.give_up(str(error))
        self._renew_lease(now_ns)
        self._end_job()
        self._run_leader(now_ns)
        return self._take_effects()

    def _take_effects(self) -> list[Effect]:
        """Return all effects collected so far, with the messages and events of the member."""
        if self._member.wants_roster:
            self._member.wants_roster = False
            self._effects += self._replica.request_roster()
        if self._replica.state and not self.store_identity.is_unclear:
            queue = inbox_queue(self._replica.state.term)
            self._effects += [Push(queue, encode(message)) for message in self._member.messages]
            self._member.messages.clear()
            if self.is_over:
                self._effects += self._liveness.end_heartbeats()
        self._effects += map(NotifyAgent, self._member.events)
        self._member.events.clear()
        effects, self._effects = self._effects, []
        return effects

    def _tick(self, now_ns: int) -> None:
        if now_ns - self.wake_ns > self._rules.heartbeat_ns:  # this process slept, perhaps with the others
            self._leader_detector.note_late_tick(now_ns)
            self.store_silence.note_late_tick(now_ns)
        if now_ns >= self._liveness.next_heartbeat_ns:
            self._effects += self._liveness.send_heartbeat(now_ns)
            if self.store_identity.is_unclear and self._replica.writing is None:
                self._effects.append(self._read_state())
        self._member.tick(now_ns)
        if self.must_end_workers(now_ns):
            self._member.cut_off(f"the store has not answered for {self._rules.silence_ns / 1e9:g} s", True)
        if self._replica.is_open and not self._inbox and self._leader_detector.must_check_leader(now_ns):
            self._read_leader()

    def _renew_lease(self, now_ns: int) -> None:
        """Renew the lease by stored heartbeats, if all others of the last round read this store (`quorum`)."""
        member, liveness, state = self._member, self._liveness, self._replica.state
        if member.wants_lease and not liveness.lease.is_being_renewed(now_ns):
            self._effects += liveness.send_heartbeat(now_ns)
        if state and not (self.store_identity.is_away or state.has_moved) and liveness.renew_lease():
            member.has_lease = liveness.has_lease(now_ns)
            if member.wants_lease and member.has_lease:
                member.note_state(state, self._replica.roster if self._replica.is_whole else None)

    # Reading the store

    def _read_state(self) -> Effect:
        return FindChanges({STATE: None, **self._liveness.sentinel})

    def _read_leader(self) -> None:
        self._effects.append(FindChanges({**self._leader_detector.keys_to_read, **self._liveness.sentinel}))

    def _handle_changes(self, now_ns: int, asked: Values, changed: Values) -> None:
        if self._liveness.is_outdated(asked):
            return
        if self._liveness.has_lost_sentinel(changed) and (asked or self._watched):
            self._start_over(now_ns)
            return
        if not asked:
            self._watched |= {key: value for key, value in changed.items() if key in self._watched}
        if STATE in asked and self.store_identity.is_unclear:
            self._judge_store(now_ns, changed.get(STATE) or b"")
        elif self._replica.raw and changed.get(STATE, b"there") is None:  # the store has lost its data
            self._start_over(now_ns)
            return
        elif STATE in asked and STATE not in changed and not self._replica.raw:
            self._create_state()
        elif value := changed.get(STATE):
            self._handle_state(now_ns, value)
        if self._inbox:
            self._inbox.put_event(Changes(asked, changed))
        elif self._replica.is_open:
            self._check_leader(now_ns, asked, changed)
        if any(key.startswith("roster/") for key in changed):
            self._handle_roster(now_ns, changed)

    def _check_leader(self, now_ns: int, asked: Values, changed: Values) -> None:
        if self._leader_detector.note_values(now_ns, asked, changed):
            self._read_leader()
        if self._leader_detector.loss:
            self._take_over()

    def _handle_state(self, now_ns: int, raw: bytes) -> None:
        if raw == self._replica.raw or not self._replica.read_state(raw):
            return
        state, replica = self._replica.state, self._replica
        assert state is not None
        self.store_identity.is_elsewhere = False
        if state.leader != self._liveness.id:
            self._step_down()
        elif self._inbox and not state.is_open:
            self._inbox.note_closed(state)
        self._follow_leader(now_ns, state)
        self._member.note_state(state, replica.roster if replica.is_whole else None)
        self._renew_watch()

    def _follow_leader(self, now_ns: int, state: JobState) -> None:
        if (
            self._leader_detector.follow_leader(now_ns, state.leader, state.term)
            and state.leader != self._liveness.id
        ):
            self._read_leader()

    def _handle_roster(self, now_ns: int, found: Values) -> None:
        if not self._replica.read_roster(found):
            return
        assert self._replica.state is not None
        self._member.note_state(self._replica.state, self._replica.roster)
        if self._claim and self._replica.writing is None:
            self._begin_leading(now_ns, self._claim)

    def _renew_watch(self) -> None:
        """Watch the state and the leader's keys or, as the leader, the held keys of all nodes."""
        state = self._replica.state
        if state is None or self.store_identity.is_unclear:
            return
        watched: dict[str, bytes | None] = {STATE: self._replica.raw, **self._liveness.sentinel}
        if self._inbox:
            leader = self._inbox.leader
            for key in map(alive_key, [*leader.nodes, *leader.unwatched, *leader.leftover_workers.nodes]):
                watched[key] = self._watched.get(key, ALIVE)
            leader.unwatched.clear()
        elif state.leader != self._liveness.id and state.is_open:
            watched |= self._leader_detector.keys_to_watch
        if watched.keys() != self._watched.keys():
            self._watched = watched
            self._effects.append(Watch(dict(watched)))

    # Becoming the leader

    def _create_state(self) -> None:
        """Write the first state, because there is none."""
        if self._member.terms and self._replica.writing is None:
            self._effects += self._replica.write_state(
                JobState(self._member.terms, self._liveness.id, job=self._liveness.id)
            )
            self._claim = _Claim()

    def _take_over(self) -> None:
        """Claim to lead in place of the lost leader."""
        state = self._replica.state
        is_free = self._replica.writing is None and not self.store_identity.is_unclear
        if state and state.is_open and self._member.may_lead and is_free:
            ours = replace(state, leader=self._liveness.id, term=state.term + 1, version=state.version + 1)
            self._effects += self._replica.write_state(ours)
            self._claim = _Claim(self._leader_detector.loss)

    def _judge_store(self, now_ns: int, raw: bytes) -> None:
        """Judge the store by its state, and go on with the state that counts."""
        replica, elsewhere = self._replica, self.store_identity.is_elsewhere
        mine, theirs = replica.state, decode_state(raw) if raw else None
        match self.store_identity.judge_state(raw, theirs, self.store_silence.has_just_woken(now_ns)):
            case Finding.THEIRS if theirs:
                if raw != replica.raw:
                    replica.forget_state()  # a store that has lost its data counts versions anew
                self._handle_state(now_ns, raw)
                self._follow_leader(now_ns, theirs)
                self._member.repeat_messages()
                self._renew_watch()
                # This node led, and has lost what was under way: new term.
                if theirs.leader == self._liveness.id:
                    self._take_over()
            case Finding.OURS if mine:
                replica.raw = raw
                restored = mine.restored(self._liveness.id, theirs, elsewhere)
                self._effects += replica.write_state(restored, replica.roster)
                self._claim = _Claim(gone=self._gone)
            case Finding.NONE:
                self._create_state()

    def _handle_compared(self, now_ns: int, value: bytes) -> None:
        replica = self._replica
        if replica.writing is None:
            return  # this node has started over since
        written, replica.writing, claim = replica.writing, None, self._claim
        was_unclear, self.store_identity.is_unclear = self.store_identity.is_unclear, False
        if was_unclear and value != written:
            self._claim = None
            self._judge_store(now_ns, value)
            return
        if not value:  # the store has lost its data
            self._start_over(now_ns)
            return
        self._handle_state(now_ns, value)
        if value != written or replica.raw != written:
            if replica.is_open:
                self._step_down()
            self._claim = None
            if claim and claim.predecessor and claim.predecessor.is_silent:  # it wrote a state: it lives
                self._leader_detector.renew_leader(now_ns)
            elif self._leader_detector.loss:
                self._take_over()
        elif claim:
            if replica.is_whole or not (replica.state and replica.state.roster):
                self._begin_leading(now_ns, claim)
            else:
                self._effects += replica.request_roster()
        elif self._inbox and replica.state:
            self._inbox.note_written(replica.replaced, replica.state)

    # Ending the job

    def _end_job(self) -> None:
        """Write the closed state if this node ends the job; again after another node's write came first."""
        state = self._replica.state
        if state and self._replica.writing is None and not self.store_identity.is_unclear:
            if closed := self._member.closing_state(state):
                self._effects += self._replica.write_state(closed)

    # Leading

    def _begin_leading(self, now_ns: int, claim: _Claim) -> None:
        state = self._replica.state
        assert state is not None
        self._claim = None
        roster = self._replica.roster if state.roster else ()
        inbox = self._inbox = LeaderInbox(self._rules, state, roster, now_ns, self._liveness.sentinel)
        self._effects.append(Pop(inbox_queue(state.term)))
        if state.term > 1:
            self._effects.append(Forget(inbox_queue(state.term - 1)))
        if claim.predecessor and claim.predecessor.leader != self._liveness.id:
            inbox.replace_leader(now_ns, claim.predecessor)
        if claim.gone:
            inbox.leader.note_agents_ended(now_ns, claim.gone, "was lost, and the store with it")
        self._renew_watch()

    def _step_down(self) -> None:
        if self._replica.writing is None:  # else the answer of the write decides
            self._claim = None
        if self._inbox:
            self._inbox = None
            self._effects.append(Pop(None))

    def _run_leader(self, now_ns: int) -> None:
        """Let the leader process events until it must write a state, then write it."""
        inbox, state = self._inbox, self._replica.state
        if inbox is None or state is None:
            return
        leader = inbox.leader
        if self._replica.writing is None:
            has_decided = inbox.process_events(now_ns)
            self._effects += inbox.effects
            inbox.effects.clear()
            if has_decided:
                decided = replace(leader.state, version=state.version + 1)
                is_new = decided.roster != state.roster
                if is_new:
                    self._renew_watch()
                self._effects += self._replica.write_state(decided, leader.roster if is_new else None)
        new = len(leader.unwatched)
        if new and (inbox.must_watch or 4 * new > len(self._watched)):
            self._renew_watch()  # not for every arrival, because a watch names all watched keys
        inbox.must_watch = False
