"""What a member concludes from the job's state: events for its agent, and messages to the leader. Pure.

A member is in one of four phases. The agent moves it to JOINING, and the state that it reads moves it on:

    IDLE, JOINING, WORKING   -- join -->                                    JOINING
    JOINING                  -- a round begins with this node -->           WORKING
    WORKING                  -- the round ends, or goes on without it -->   IDLE
    any                      -- the job ends, or cannot be joined -->       OVER

Rules

1. A joining node repeats its request whenever the state shows that the leader may not have got it: in a new term, or
   when a round has begun or ended without this node. A node repeats its other messages in each new term. It repeats
   every message that has no effect for three heartbeats, because the leader may have lost sight of this node.
2. Only the roster tells whether a round has begun with this node.
3. A node in round N compares N with the state's number. If N+1 forms, the round has ended. If the number is later, or
   the cause names this node among the lost, the others have gone on without it. Until the node joins again, it may
   have workers of round N that are still ending, so it learns of that also after the end of round N.
4. A node whose terms differ from the job's names the difference and does not take part.
5. A node ends the job without the leader, which may be lost: it makes the state that closes the job. A node that was
   frozen or cut off knows an old state only, and does not end a job that has gone on without it. A node that has just
   come, and knows no state, ends the job in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from ronde.rendezvous.membership import (
    HOW_TO_RESUME,
    AllSucceeded,
    Budget,
    Ejected,
    Failure,
    JobClosed,
    Node,
    NodesLost,
    Notice,
    RendezvousBroken,
    RendezvousEvent,
    Round,
    RoundBegan,
    RoundEnded,
    Rules,
    node_names,
)
from ronde.rendezvous.state import (
    Cause,
    ChangeRequest,
    FailureReport,
    JobPhase,
    JobState,
    JobTerms,
    JoinRequest,
    LeaveNotice,
    Message,
    RosterKey,
    SuccessReport,
)

__all__ = [
    "Member",
    "waiting_message",
    "timeout_message",
]

# In addition to two times of silence: how long the others may take to come to the store to which this node has moved.
STUCK_NS = 30 * 10**9
MESSAGE_CHARACTERS, DETAILS_CHARACTERS = 2_000, 20_000  # of a failure, which every node reads


class _MemberPhase(Enum):
    IDLE = auto()  # before the first `join`, and between the end of a round and the next one
    JOINING = auto()
    WORKING = auto()
    OVER = auto()


class _Ending(NamedTuple):
    """This node ends the job; `known` is the state that it knew when its agent asked for that."""

    reason: str
    known: JobState | None


class Member:
    """The machine of one member.

    `messages` are for the leader, `events` for the agent; the caller takes both after each call.
    `wants_roster`: the member needs the roster that the state names. `wants_lease`: a round with this node has begun,
    but its lease has run out (`liveness`); the next `note_state` with a new lease tells the agent.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._phase = _MemberPhase.IDLE
        self._node: Node | None = None
        self._terms: JobTerms | None = None
        self._state: JobState | None = None
        self._number = -1  # of the round that this node is or was in
        self._roster_key: RosterKey | None = None  # of that round, with its term
        self._nodes: tuple[Node, ...] = ()
        self._requested: tuple[int, int] | None = None  # term and `after` of the last `JoinRequest`
        self._unanswered: Message | None = None  # another message that has had no effect yet
        self._unanswered_term = -1
        self._ending: _Ending | None = None
        self._is_left_working = False  # the round or the store is gone, but workers may still be ending
        self._seq = 0
        self._deadline_ns = 0  # when this node stops waiting for a round
        self._again_ns = 0  # when to repeat what has had no effect
        self._stuck_ns = 0  # the same, while it is unclear whether the others can go on
        self._has_moved = False  # to another store, and it is unclear whether the others have
        self._pending = -1  # after this round the node has asked for a place, in the store that is lost
        self._promised = -1  # the same, in stores before that
        self._floor = -1  # the latest round in which an earlier store may give this node a place
        self._reported = ""  # the last notice about missing nodes
        self._is_surplus = False  # the job was full when this node came, which is no spare
        self.messages: list[Message] = []
        self.events: list[RendezvousEvent] = []
        self.wants_roster = False
        self.wants_lease = False
        self.has_lease = True

    @property
    def node(self) -> Node | None:
        """The description of this node; None before `join`."""
        return self._node

    @property
    def wake_ns(self) -> int | None:
        """When `tick` is due."""
        if self._phase == _MemberPhase.JOINING:
            return self._again_ns if self._is_spare() else min(self._due_ns, self._again_ns)
        return self._again_ns if self._phase == _MemberPhase.WORKING and self._unanswered else None

    @property
    def _is_new(self) -> bool:
        """Whether this node has been in no round."""
        return self._number < 0

    @property
    def terms(self) -> JobTerms | None:
        """The terms on which this node takes part; None before `join`."""
        return self._terms

    @property
    def may_lead(self) -> bool:
        """Whether this node may become the leader: it takes part, and does not leave."""
        return self._node is not None and not self.is_over and not isinstance(self._unanswered, LeaveNotice)

    @property
    def is_working(self) -> bool:
        """Whether this node may have workers, also of a round that has ended."""
        return self._phase == _MemberPhase.WORKING or self._is_left_working

    @property
    def is_over(self) -> bool:
        """Whether the member has told the agent its last event."""
        return self._phase == _MemberPhase.OVER

    @property
    def is_ending(self) -> bool:
        """Whether this node ends the job, and the state does not say so yet."""
        return self._ending is not None

    # Requests of the agent

    def join(self, now_ns: int, node: Node, budget: Budget) -> None:
        """Take part in the next round."""
        if self._phase == _MemberPhase.OVER:
            return
        self._node, self._terms = node, JobTerms.of(self._rules, budget)
        self._phase = _MemberPhase.JOINING
        self._requested = None
        self._unanswered = None
        self._is_left_working = node.has_workers
        self._deadline_ns = now_ns + self._rules.patience_ns(self._is_new)
        self._stuck_ns = now_ns + 2 * self._rules.silence_ns + STUCK_NS
        self._again_ns = now_ns + self._rules.silence_ns
        self._consider()

    def update_node(self, node: Node) -> None:
        """Ask for a place again, with another description of this node; without effect if it asks for none."""
        if self._phase == _MemberPhase.JOINING and not isinstance(self._unanswered, LeaveNotice):
            self._node, self._is_left_working = node, node.has_workers
            if self._requested:
                self._requested = -1, self._requested[1]
            self._consider()

    def fail(self, failure: Failure) -> None:
        """Report that a worker has failed."""
        if self._phase == _MemberPhase.WORKING and self._node:
            short = replace(
                failure,
                message=failure.message[:MESSAGE_CHARACTERS],
                details=failure.details[-DETAILS_CHARACTERS:],
            )
            self._send_message(FailureReport(self._next_seq(), self._node.id, self._number, short))

    def request_change(self, reason: str) -> None:
        """Ask for the end of this round."""
        if self._phase == _MemberPhase.WORKING and self._node and self._unanswered is None:
            self._send_message(ChangeRequest(self._next_seq(), self._node.id, self._number, reason))

    def succeed(self) -> int:
        """Report that all workers have succeeded. Returns the number of the round."""
        if (
            self._phase == _MemberPhase.WORKING
            and self._node
            and not isinstance(self._unanswered, SuccessReport)
        ):
            self._send_message(SuccessReport(self._next_seq(), self._node.id, self._number))
        return self._number

    def leave(self, reason: str, ends_within_ns: int) -> None:
        """Announce that this node leaves. Its workers end within that time."""
        if self._node and self._phase != _MemberPhase.OVER:
            self._send_message(
                LeaveNotice(self._next_seq(), self._node.id, self._node.host, reason, ends_within_ns)
            )

    def end_job(self, reason: str) -> None:
        """End the job for all nodes, by the state that `closing_state` returns."""
        if self._node and self._phase != _MemberPhase.OVER:
            self._ending = _Ending(reason, self._state)

    def closing_state(self, state: JobState) -> JobState | None:
        """Return the state that ends the job; None if this node does not end it, or may not."""
        if self._ending and self._node and state.is_open:
            if self._has_gone_on(state, self._ending):
                self._ending = None
            else:
                reason = f"{self._node.host}: {self._ending.reason}"
                return replace(state, version=state.version + 1, phase=JobPhase.CLOSED, reason=reason)
        return None

    def _has_gone_on(self, state: JobState, ending: _Ending) -> bool:
        """Return whether the job has gone on without this node since it wanted to end it."""
        if self._phase == _MemberPhase.JOINING:
            # One round may begin meanwhile. A node that knew no state was unknown to the others, so it is not lost.
            return ending.known is not None and state.number > ending.known.number + 1
        # While a round runs, the cause is that of the round before, and this node may have come back since.
        was_lost = state.phase == JobPhase.FORMING and bool(self._why_lost(state.cause))
        return was_lost or state.roster != self._roster_key

    def tick(self, now_ns: int) -> None:
        """Do what is due at this time."""
        wake_ns = self.wake_ns
        if wake_ns is None or now_ns < wake_ns or self._node is None:
            return
        if self._phase == _MemberPhase.JOINING and now_ns >= self._due_ns and not self._is_spare():
            self.messages.append(
                LeaveNotice(self._next_seq(), self._node.id, self._node.host, "has waited long enough")
            )
            self._notify_last(
                RendezvousBroken(timeout_message(self._rules, self._state, self._has_moved, self._is_new))
            )
            return
        self._again_ns = now_ns + self._rules.silence_ns
        self.repeat_messages()

    def repeat_messages(self) -> None:
        """Repeat what has had no effect, because the leader may not have got it."""
        if self._requested:
            self._requested = -1, self._requested[1]
        self._unanswered_term = -1
        self._consider()

    @property
    def _due_ns(self) -> int:
        return min(self._deadline_ns, self._stuck_ns) if self._has_moved else self._deadline_ns

    def give_up(self, reason: str) -> None:
        """End this node's part, because the store is lost for good."""
        if self._phase != _MemberPhase.OVER:
            may_work = self.is_working
            self._notify_last(RendezvousBroken(reason))
            self._is_left_working = may_work

    def cut_off(self, reason: str, is_unsure: bool = False) -> None:
        """Tell the agent that the others may have gone on, if it may have workers; `is_unsure`: see `Ejected`."""
        if self.is_working:
            self._is_left_working = False
            self._notify(Ejected(reason, is_unsure), _MemberPhase.OVER if self.is_over else _MemberPhase.IDLE)

    def lose_store(self, broke_now: bool) -> None:
        """Note that the store is lost; unless it broke for all nodes, the leader may still act on earlier messages."""
        state = self._state
        if (
            self._phase == _MemberPhase.JOINING
            and self._requested
            and state
            and state.roster
            and not broke_now
        ):
            self._pending = state.roster.number

    def enter_store(self, now_ns: int, elsewhere: bool) -> None:
        """Go on at a store, the same or another one (`elsewhere`)."""
        self.messages.clear()  # the member says it again, with what it knows by then
        if elsewhere:
            self._has_moved = True
            self._stuck_ns = now_ns + 2 * self._rules.silence_ns + STUCK_NS
            self._promised = max(self._promised, self._pending)
            if self._requested:
                self._floor = max(self._floor, self._requested[1] + 1)
        self._pending = -1

    def forget_job(self, reason: str) -> None:
        """Drop all that belongs to the job that this node has seen so far: this is another one."""
        self._state, self._requested = None, None
        self._number, self._floor, self._roster_key = -1, -1, None
        self._promised = -1
        self._ending = None
        self.cut_off(reason)
        if self._phase == _MemberPhase.JOINING:
            self.events.append(Notice(reason))

    # The state

    def note_state(self, state: JobState, roster: Sequence[Node] | None = None) -> None:
        """Read the state; with the roster, if `wants_roster` has asked for it."""
        self._state, self._has_moved = state, state.has_moved
        self._consider(roster)

    def _consider(self, roster: Sequence[Node] | None = None) -> None:
        self.wants_roster = False
        state = self._state
        if state is None:
            return
        match self._phase:
            case _MemberPhase.JOINING:
                self._consider_joining(state, roster)
            case _MemberPhase.WORKING:
                self._consider_working(state)
            case _MemberPhase.IDLE:
                self._consider_ended_round(state)
        if not self.is_over and self._unanswered and self._unanswered_term != state.term:
            self._unanswered_term = state.term
            self._unanswered = replace(self._unanswered, seq=self._next_seq())
            self.messages.append(self._unanswered)

    def _consider_end(self, state: JobState) -> bool:
        if state.phase == JobPhase.CLOSED:
            self._notify_last(JobClosed(state.reason, state.failure))
        elif state.phase == JobPhase.COMPLETED:
            if self._roster_key == state.roster and self._phase == _MemberPhase.WORKING:
                self._notify_last(AllSucceeded(state.number))
            else:
                was_full = self._is_surplus and self._is_full(state)
                self._notify_last(JobClosed("the job has completed", completed=True, was_full=was_full))
        return self.is_over

    def _consider_joining(self, state: JobState, roster: Sequence[Node] | None) -> None:
        assert self._node is not None
        assert self._terms is not None
        if self._consider_end(state):
            return
        refusal = next((each.reason for each in state.refused if each.id == self._node.id), "")
        if difference := self._terms.difference(state.terms):
            refusal = f"this node has {difference}: start all nodes of the job alike"
        if refusal:
            self._notify_last(RendezvousBroken(f"{self._node.host} cannot take part: {refusal}"))
            return
        if state.phase == JobPhase.FORMING:
            self._request_place(state, state.number - 1)
            self._report_missing(state)
            return
        if self._requested is not None and self._requested[1] < state.number:
            if roster is None:
                self.wants_roster = True
                return
            ids = [node.id for node in roster]
            if self._node.id in ids:
                self.wants_lease = not self.has_lease
                if self.wants_lease:
                    return
                self._begin_round(state, tuple(roster), ids.index(self._node.id))
                return
            self.cut_off("the others went on without this node")
            if self._phase != _MemberPhase.JOINING:
                return
        self._is_surplus = self._is_new and self._is_full(state) and not self._is_spare()
        self._request_place(state, state.number)

    def _is_full(self, state: JobState) -> bool:
        """Return whether all places are taken; that of a node that died after its success is not."""
        return state.alive >= self._rules.max_nodes

    def _begin_round(self, state: JobState, roster: tuple[Node, ...], group_rank: int) -> None:
        self._number, self._roster_key, self._nodes = state.number, state.roster, roster
        began = Round(
            state.number, roster, group_rank, state.restarts, state.changes, state.job, state.previous
        )
        self._is_left_working = False
        self._notify(RoundBegan(began), _MemberPhase.WORKING)

    def _consider_working(self, state: JobState) -> None:
        assert self._node is not None
        if self._consider_end(state) or (
            state.phase == JobPhase.RUNNING and state.roster == self._roster_key
        ):
            return
        if isinstance(self._unanswered, LeaveNotice):
            return  # the others wait for the workers of this node
        cause = state.cause
        if state.phase == JobPhase.FORMING and state.number == self._number + 1 and cause is not None:
            why = self._why_lost(cause)
            if not why:
                self._is_left_working = True
                self._notify(RoundEnded(self._number, cause), _MemberPhase.IDLE)
                return
        else:
            why = "this node was not heard of in time"
        (name,) = node_names([self._node], self._nodes)
        self.cut_off(f"the others went on without {name}: {why}")

    def _consider_ended_round(self, state: JobState) -> None:
        """Consider the state after the end of this node's last round, while its workers may still be ending."""
        if self._consider_end(state) or isinstance(self._unanswered, LeaveNotice) or self._node is None:
            return
        if state.phase == JobPhase.RUNNING and state.roster != self._roster_key:
            (name,) = node_names([self._node], self._nodes)
            self.cut_off(f"the others went on without {name}: its workers took too long to end")

    def _why_lost(self, cause: Cause | None) -> str:
        """Return why the others take this node for lost; empty if they do not."""
        if not isinstance(cause, NodesLost) or self._node is None:
            return ""
        return cause.reason if self._node.id in cause.ids(self._nodes) else ""

    # Messages and events

    def _request_place(self, state: JobState, after: int) -> None:
        assert self._node is not None
        after = max(after, self._number, self._floor)  # a store that lost its memory may show an older round
        if self._requested != (state.term, after):
            self._requested = state.term, after
            self.messages.append(JoinRequest(self._next_seq(), self._node, after, self._promised))

    def _send_message(self, message: Message) -> None:
        self._unanswered = message
        if self._state:
            self._unanswered_term = self._state.term
            self.messages.append(message)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _notify(self, event: RendezvousEvent, phase: _MemberPhase) -> None:
        self._phase = phase
        if not isinstance(self._unanswered, LeaveNotice):
            self._unanswered = None
        self._reported = ""
        self.events.append(event)

    def _notify_last(self, event: RendezvousEvent) -> None:
        self._ending = None
        self._is_left_working = False  # where the job has ended, no workers follow those of this node
        self._notify(event, _MemberPhase.OVER)

    def _is_spare(self) -> bool:
        if self._has_moved:
            return False
        return self._state is not None and self._node is not None and self._node.id in self._state.spares

    def _report_missing(self, state: JobState) -> None:
        text = waiting_message(self._rules, state)
        if text and text != self._reported:
            self._reported = text
            self.events.append(Notice(text))


def waiting_message(rules: Rules, state: JobState) -> str:
    """Return a message about the nodes that this node waits for, or "" if it needs no particular ones."""
    if 0 < state.joined < rules.min_nodes:
        return f"{_of_nodes(state.joined, rules.min_nodes)}; waiting for the others"
    return f"{_missing(state.missing)}; waiting for that" if state.missing else ""


def timeout_message(rules: Rules, state: JobState | None, has_moved: bool, is_new: bool = False) -> str:
    """Return why no round has begun.

    `has_moved`: this node has left the store, and the others perhaps have not. `is_new`: it has been in no round.
    """
    waited = f"waited {rules.patience_ns(is_new) / 1e9:g} s"
    if state is None:
        return f"{waited} for any sign of the job"
    if state.missing or has_moved:
        return f"no round has begun: {_missing(state.missing)}. {HOW_TO_RESUME}"
    if state.phase == JobPhase.RUNNING:
        return f"{waited} for a place in the job, which is full with {rules.max_nodes} nodes"
    joined = max(state.joined, 1)
    is_start = is_new and rules.first_join_timeout_ns
    longer = f"or wait longer ({'--start-timeout' if is_start else '--elastic-timeout SECONDS'})"
    resume = "" if is_new else f". {HOW_TO_RESUME}"
    if rules.min_slots and joined >= rules.min_nodes:
        have = "the node here has" if joined == 1 else f"the {joined} nodes here have"
        return f"{waited} for {rules.min_slots} slots, and {have} fewer; add others, {longer}{resume}"
    return f"{waited} for all nodes: {_of_nodes(joined, rules.min_nodes)}; start the others, {longer}{resume}"


def _of_nodes(joined: int, needed: int) -> str:
    return f"{joined} of {needed} nodes {'is' if joined == 1 else 'are'} here"


def _missing(count: int) -> str:
    nodes = "one more node" if count == 1 else f"{count or 'some'} more nodes"
    return f"{nodes} of the last round must be here, or others that cannot be reached might go on as well"
