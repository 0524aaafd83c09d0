"""One node's part in the rendezvous of its job: a member always, the leader sometimes. Pure.

All that the nodes share is a store. One key is the `JobState`; every node watches it. A node that wants something puts
a message into the leader's inbox; the leader decides (`core/rendezvous/leader`) and writes the next state, which the
members understand (`core/rendezvous/member`). So a round costs a few messages per node, however many there are.

Rules

1. The state is changed by compare-and-set only (`core/rendezvous/state_replica`). Whoever believes to lead and does
   not, learns of it by the value that comes back, and stops.
2. The leader looks at no further news while a write is under way: it builds on nothing that others cannot see.
3. A leader that is lost (`core/rendezvous/leader_detector`) is replaced by whoever is first to write a state with the
   next term. Each term has an inbox of its own, and everybody says again what is not heeded.
4. No clock value travels. Silence is judged by each node's own clock, and only after looking once more.
5. A store may lose its memory, or be replaced by another one (`core/rendezvous/store_identity`). Then whoever knows
   more than the store claims to lead, with all that it knows; so what is known by most of all wins, and the job goes
   on.
6. A store may also come back without what was held in it, and only that. Whoever notices (`core/rendezvous/liveness`),
   before it believes anything of held keys, begins again from what is in the store; a leader in a term of its own.
7. Who ends the job writes that itself, by compare-and-set until it is written, whoever leads and whether anybody does.
8. What the shell is asked to do, it does in order, and doing it twice does no harm. When something may not have been
   done, the shell says so (`enter_store`): then everything begins again, too.

The shell passes in what happens (`step`), does what comes back, and calls with `Tick` at `wake_ns`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from ronde.core.rendezvous.codec import decode_state, encode
from ronde.core.rendezvous.effects import (
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
from ronde.core.rendezvous.leader_detector import LeaderDetector, LeaderLoss
from ronde.core.rendezvous.leader_inbox import LeaderInbox
from ronde.core.rendezvous.liveness import Liveness
from ronde.core.rendezvous.member import Member
from ronde.core.rendezvous.membership import Budget, Failure, Node
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import ALIVE, STATE, JobState, alive_key, inbox_queue
from ronde.core.rendezvous.state_replica import StateReplica
from ronde.core.rendezvous.store_identity import Finding, StoreIdentity
from ronde.core.rendezvous.store_silence import StoreSilence
from ronde.errors import ProtocolError

__all__ = ["Participant"]


class _Claim(NamedTuple):
    """To lead, in the place of a lost leader, or where the store is another one, with which some nodes have `gone`."""

    predecessor: LeaderLoss | None = None
    gone: frozenset[str] = frozenset()


class Participant:
    """The machine of one node. Every method takes the time, in nanoseconds of any monotonic clock, and returns what is
    to be done. `join` comes first.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._member = Member(rules)
        self._liveness = Liveness(rules)
        self._leader_detector = LeaderDetector(rules)
        self._replica = StateReplica()
        self.store_identity = StoreIdentity(self._replica)
        self._inbox: LeaderInbox | None = None  # while this node leads
        self._claim: _Claim | None = None  # to lead: it is being written, or the roster is being read
        self._watched: dict[str, bytes | None] = {}
        self._gone: frozenset[str] = frozenset()  # nodes that died with the last store
        self.store_silence = StoreSilence(rules)  # with the store
        self._effects: list[Effect] = []

    # What the agent asks for

    def join(self, now_ns: int, node: Node, budget: Budget) -> list[Effect]:
        """Take part in the next round."""
        is_first = not self._liveness.id
        self._liveness.id = node.id
        self._liveness.lease.begin_lease(now_ns)
        self._member.join(now_ns, node, budget)
        if is_first:
            self._leader_detector.renew_leader(now_ns)
            self._introduce_node(now_ns)
        elif self._leader_detector.loss:
            self._take_over()
        return self._take_effects()

    def fail(self, failure: Failure) -> list[Effect]:
        """A worker of this node has failed."""
        self._member.fail(failure)
        return self._take_effects()

    def succeed(self, now_ns: int) -> list[Effect]:
        """All workers of this node have succeeded."""
        self._effects += self._liveness.send_heartbeat(now_ns, self._member.succeed())
        return self._take_effects()

    def leave(self, reason: str, ends_within_ns: int = 0) -> list[Effect]:
        """Go away in good order. The workers of this node end within that time."""
        self._member.leave(reason, ends_within_ns)
        return self._take_effects()

    def end_job(self, reason: str) -> list[Effect]:
        """End the job for all, unless it has gone on without this node."""
        self._member.end_job(reason)
        self._end_job()
        return self._take_effects()

    def give_up(self, reason: str) -> list[Effect]:
        """The store is lost for good."""
        self._inbox = None
        self._member.give_up(reason)
        return self._take_effects()

    def lose_store(self, broke_now: bool) -> None:
        """There is no store until `enter_store`. `broke_now`: its process has ended, and was there until then."""
        self._member.lose_sight(broke_now)
        self.store_identity.is_unclear = True

    def enter_store(
        self, now_ns: int, gone: Collection[str] = (), forget: str = "", elsewhere: bool = False
    ) -> list[Effect]:
        """All operations under way are lost; the store may have lost its memory, or be another one.

        `gone`: nodes that died with it; others may be on their way. `forget`: why what we know is not of this job.
        `elsewhere`: it is another one, and the last one may live.
        """
        self._member.move(now_ns, elsewhere)
        if forget:
            self._member.forget(forget)
            self._replica = StateReplica()
            self.store_identity = StoreIdentity(self._replica)
        self.store_identity.is_elsewhere = self.store_identity.is_elsewhere or elsewhere
        self._gone = frozenset(gone)
        self._start_over(now_ns)
        return self._take_effects()

    def _start_over(self, now_ns: int) -> None:
        """From what is in the store."""
        self._effects.clear()
        self._step_down()
        self.store_identity.reset()
        self._replica.writing = self._claim = None
        self._watched = {}
        self._leader_detector.reset(now_ns)
        self._introduce_node(now_ns)

    def _introduce_node(self, now_ns: int) -> None:
        self.store_silence.note_answer(now_ns)
        self._effects += [*self._liveness.hold_keys(now_ns), self._read_state()]

    # What others may know

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return self._inbox is not None

    def must_end_workers(self, now_ns: int) -> bool:
        """Return whether this node is in a round, and the others may have gone on without it."""
        return self._member.is_working and self._liveness.lease.has_ended(now_ns)

    @property
    def is_ending(self) -> bool:
        """Whether this node ends the job, and the others cannot know yet."""
        return self._member.is_ending

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or this node's part in it, and nothing is asked of the store any more."""
        return self._member.is_over and not self._replica.is_open

    @property
    def has_joined(self) -> bool:
        """Whether `join` has been called: before that there is nothing to do."""
        return self._liveness.id != ""

    @property
    def roster(self) -> tuple[Node, ...]:
        """The nodes of the last round that this node has read of, by group rank."""
        return self._replica.roster

    @property
    def others(self) -> list[str]:
        """The ids of the nodes that this one knows of; the leader knows of all."""
        known = self._inbox.leader.nodes if self._inbox else [node.id for node in self.roster]
        return [node for node in known if node != self._liveness.id]

    @property
    def state(self) -> JobState | None:
        """The state as it was seen last."""
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

    # What happens

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return what to do about the event."""
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
        except ProtocolError as error:  # what is there was written by another version, say
            self._member.give_up(str(error))
        self._renew_lease(now_ns)
        self._end_job()
        self._run_leader(now_ns)
        return self._take_effects()

    def _take_effects(self) -> list[Effect]:
        """Everything that is to be done, with what the member has to say and tell."""
        if self._member.wants_roster:
            self._member.wants_roster = False
            self._effects += self._replica.request_roster()
        if self._replica.state and not self.store_identity.is_unclear:
            queue = inbox_queue(self._replica.state.term)
            self._effects += [Push(queue, encode(message)) for message in self._member.says]
            self._member.says.clear()
            if self.is_over:
                self._effects += self._liveness.end_heartbeats()
        self._effects += map(NotifyAgent, self._member.tells)
        self._member.tells.clear()
        effects, self._effects = self._effects, []
        return effects

    def _tick(self, now_ns: int) -> None:
        if now_ns - self.wake_ns > self._rules.heartbeat_ns:  # we overslept, and know nothing of the others
            self._leader_detector.note_late_tick(now_ns)
            self.store_silence.note_late_tick(now_ns)
        if now_ns >= self._liveness.next_heartbeat_ns:
            self._effects += self._liveness.send_heartbeat(now_ns)
            if self.store_identity.is_unclear and self._replica.writing is None:
                self._effects.append(self._read_state())
        self._member.tick(now_ns)
        if self.must_end_workers(now_ns):
            self._member.cut_off(f"the store has not answered for {self._rules.silence_ns / 1e9:g} s")
        if self._replica.is_open and not self._inbox and self._leader_detector.must_check_leader(now_ns):
            self._read_leader()

    def _renew_lease(self, now_ns: int) -> None:
        """As far as heartbeats were stored where all others of the last round look for them (`quorum`)."""
        member, liveness, state = self._member, self._liveness, self._replica.state
        if member.wants_lease and not liveness.lease.is_being_renewed(now_ns):
            self._effects += liveness.send_heartbeat(now_ns)
        if state and not (self.store_identity.is_away or state.has_moved) and liveness.renew_lease():
            member.has_lease = liveness.has_lease(now_ns)
            if member.wants_lease and member.has_lease:
                member.see(state, self._replica.roster if self._replica.is_whole else None)

    # Looking

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
        elif self._replica.raw and changed.get(STATE, b"there") is None:  # the store has lost its memory
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
        self._member.see(state, replica.roster if replica.is_whole else None)
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
        self._member.see(self._replica.state, self._replica.roster)
        if self._claim and self._replica.writing is None:
            self._begin_leading(now_ns, self._claim)

    def _renew_watch(self) -> None:
        """Watch the state, and the leader's life or, as the leader, everybody's."""
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
        """There is no state: make the first one."""
        if self._member.terms and self._replica.writing is None:
            self._effects += self._replica.write_state(
                JobState(self._member.terms, self._liveness.id, job=self._liveness.id)
            )
            self._claim = _Claim()

    def _take_over(self) -> None:
        """The leader is gone: be the first to say so."""
        state = self._replica.state
        is_free = self._replica.writing is None and not self.store_identity.is_unclear
        if state and state.is_open and self._member.may_lead and is_free:
            ours = replace(state, leader=self._liveness.id, term=state.term + 1, version=state.version + 1)
            self._effects += self._replica.write_state(ours)
            self._claim = _Claim(self._leader_detector.loss)

    def _judge_store(self, now_ns: int, raw: bytes) -> None:
        """Is this the state as we know it, a newer one, or has the store forgotten something?"""
        replica, elsewhere = self._replica, self.store_identity.is_elsewhere
        mine, theirs = replica.state, decode_state(raw) if raw else None
        match self.store_identity.judge_state(raw, theirs, self.store_silence.has_just_woken(now_ns)):
            case Finding.THEIRS if theirs:
                if elsewhere:
                    replica.forget_state()  # versions count at one place only
                self._handle_state(now_ns, raw)
                self._follow_leader(now_ns, theirs)
                self._member.say_again()
                self._renew_watch()
                if theirs.leader == self._liveness.id:  # we are not any more: what was under way is lost
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
            return  # we have begun again since
        written, replica.writing, claim = replica.writing, None, self._claim
        was_unclear, self.store_identity.is_unclear = self.store_identity.is_unclear, False
        if was_unclear and value != written:
            self._claim = None
            self._judge_store(now_ns, value)
            return
        if not value:  # the store has lost its memory
            self._start_over(now_ns)
            return
        self._handle_state(now_ns, value)
        if value != written or replica.raw != written:
            if replica.is_open:
                self._step_down()
            self._claim = None
            if claim and claim.predecessor and claim.predecessor.is_silent:  # it has written: it lives
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
        """Close it if this node wants that; and again, if somebody else has written something meanwhile."""
        state = self._replica.state
        if state and self._replica.writing is None and not self.store_identity.is_unclear:
            if closed := self._member.closed(state):
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
        if self._replica.writing is None:  # else it is seen when that comes back
            self._claim = None
        if self._inbox:
            self._inbox = None
            self._effects.append(Pop(None))

    def _run_leader(self, now_ns: int) -> None:
        """Let the leader go on, until it has something to write."""
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
            self._renew_watch()  # not at once for each who comes, because a watch names all that are watched
        inbox.must_watch = False
