"""What a node makes of the state: what it tells its agent, and what it has to say to the leader. Pure.

Rules

1. A node that wants in says so, and says it again whenever the state shows that it may not have been heeded: in a new
   term, or when a round has begun or ended without it. Everything else it says again in every new term. And whatever is
   not heeded for as long as it takes to be declared dead is said again: the leader may have lost sight of this node.
2. Whether a round has begun with this node stands in the roster alone.
3. A node in round N goes by the state's number: N+1 being formed, the round has ended; anything later, or the node
   named among the lost, and the others have gone on without it.
4. A node with other terms than the job's says what differs and does not take part.
5. Who ends the job needs no leader, who may be lost: it makes the state itself by which the job is closed. But a node
   that was frozen or cut off, and so knows an old state, ends no job that has gone on without it. One that has just
   come, and knows none yet, ends the job whatever that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from ronde.core.rendezvous.membership import (
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
)
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import (
    Cause,
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
from ronde.core.rendezvous.wait_messages import waits_for, waits_in_vain

__all__ = ["Member"]

# Beside two times of silence: how long the others may take to come to where we have moved.
STUCK_NS = 30 * 10**9
MESSAGE_CHARACTERS, DETAILS_CHARACTERS = 2_000, 20_000  # of a failure: everybody reads it


class _MemberPhase(Enum):
    IDLE = auto()  # not asked yet, or the last round has ended and the agent has not joined again
    JOINING = auto()
    WORKING = auto()
    OVER = auto()


class _Ending(NamedTuple):
    """This node wants the job to end; `known` is the state that it knew then."""

    reason: str
    known: JobState | None


class Member:
    """The machine. `says` and `tells` collect what is to be said to the leader and to the agent; take them after each
    call. `wants_roster`: the state cannot be understood without the roster that it names. `wants_lease`: a round with
    this node has begun, but its lease has run out (`lease`); then `see` tells the agent, once there is another.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._place = _MemberPhase.IDLE
        self._node: Node | None = None
        self._terms: JobTerms | None = None
        self._state: JobState | None = None
        self._number = -1  # of the round that this node is or was in
        self._roster_key: RosterKey | None = None  # of that round: with its term, so that it is this round
        self._nodes: tuple[Node, ...] = ()
        self._said: tuple[int, int] | None = None  # term and `after` of the last Join
        self._wish: Message | None = None  # what else is not heeded yet
        self._wish_term = -1
        self._ending: _Ending | None = None
        self._is_left_working = False  # though the store is lost for good: workers may still be ending
        self._seq = 0
        self._deadline_ns = 0  # until when to wait for a round
        self._again_ns = 0  # when to say again what has not been heeded
        self._stuck_ns = 0  # until when, if it is not clear that the others cannot go on
        self._has_moved = False  # and it is not clear that the others have
        self._pending = -1  # the round after which we have asked the lost store for a place
        self._promised = -1  # and those where we were before
        self._floor = -1  # the latest round that we may be given a place in where we were before
        self._shown = ""  # what we have last said of those who are missing
        self.says: list[Message] = []
        self.tells: list[RendezvousEvent] = []
        self.wants_roster = False
        self.wants_lease = False
        self.has_lease = True

    @property
    def node(self) -> Node | None:
        """What this node says of itself, once it has joined."""
        return self._node

    @property
    def wake_ns(self) -> int | None:
        """When `tick` wants to be called."""
        if self._place == _MemberPhase.JOINING:
            return self._again_ns if self._is_spare() else min(self._due_ns, self._again_ns)
        return self._again_ns if self._place == _MemberPhase.WORKING and self._wish else None

    @property
    def terms(self) -> JobTerms | None:
        """On what terms this node takes part, once it has joined."""
        return self._terms

    @property
    def may_lead(self) -> bool:
        """Whether this node takes part, so that it can take over."""
        return self._node is not None and not self.is_over and not isinstance(self._wish, LeaveNotice)

    @property
    def is_working(self) -> bool:
        """Whether this node may have workers of a round that others may end."""
        return self._place == _MemberPhase.WORKING or self._is_left_working

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to tell."""
        return self._place == _MemberPhase.OVER

    @property
    def is_ending(self) -> bool:
        """Whether this node wants to end the job, and that is not in the state yet."""
        return self._ending is not None

    # What the agent asks for

    def join(self, now_ns: int, node: Node, budget: Budget) -> None:
        """Take part in the next round."""
        if self._place == _MemberPhase.OVER:
            return
        self._node, self._terms = node, JobTerms.of(self._rules, budget)
        self._place = _MemberPhase.JOINING
        self._said = None
        self._wish = None
        self._deadline_ns = now_ns + self._rules.join_timeout_ns
        self._stuck_ns = now_ns + 2 * self._rules.silence_ns + STUCK_NS
        self._again_ns = now_ns + self._rules.silence_ns
        self._consider()

    def fail(self, failure: Failure) -> None:
        """A worker has failed."""
        if self._place == _MemberPhase.WORKING and self._node:
            short = replace(
                failure,
                message=failure.message[:MESSAGE_CHARACTERS],
                details=failure.details[-DETAILS_CHARACTERS:],
            )
            self._wish_for(FailureReport(self._next_seq(), self._node.id, self._number, short))

    def succeed(self) -> int:
        """All workers have succeeded. Returns the round."""
        if self._place == _MemberPhase.WORKING and self._node and not isinstance(self._wish, SuccessReport):
            self._wish_for(SuccessReport(self._next_seq(), self._node.id, self._number))
        return self._number

    def leave(self, reason: str, ends_within_ns: int) -> None:
        """Go away. The workers of this node end within that time."""
        if self._node and self._place != _MemberPhase.OVER:
            self._wish_for(
                LeaveNotice(self._next_seq(), self._node.id, self._node.host, reason, ends_within_ns)
            )

    def end_job(self, reason: str) -> None:
        """End it for everybody, by what `closed` returns."""
        if self._node and self._place != _MemberPhase.OVER:
            self._ending = _Ending(reason, self._state)

    def closed(self, state: JobState) -> JobState | None:
        """Return how this node ends the job whose state is this, if it wants to and may."""
        if self._ending and self._node and state.is_open:
            if self._has_gone_on(state, self._ending):
                self._ending = None
            else:
                reason = f"{self._node.host}: {self._ending.reason}"
                return replace(state, version=state.version + 1, phase=JobPhase.CLOSED, reason=reason)
        return None

    def _has_gone_on(self, state: JobState, ending: _Ending) -> bool:
        """Whether the job went on without this node before that could end it."""
        if self._place == _MemberPhase.JOINING:
            # One round may begin while that is said. Who knew of nothing was known to nobody: it is not taken for dead.
            return ending.known is not None and state.number > ending.known.number + 1
        # While a round runs, the cause is that of the one before, of which this node may have come back.
        was_lost = state.phase == JobPhase.FORMING and bool(self._why_lost(state.cause))
        return was_lost or state.roster != self._roster_key

    def tick(self, now_ns: int) -> None:
        """Look at the clock."""
        wake_ns = self.wake_ns
        if wake_ns is None or now_ns < wake_ns or self._node is None:
            return
        if self._place == _MemberPhase.JOINING and now_ns >= self._due_ns and not self._is_spare():
            self.says.append(
                LeaveNotice(self._next_seq(), self._node.id, self._node.host, "has waited long enough")
            )
            self._tell_last(RendezvousBroken(waits_in_vain(self._rules, self._state, self._has_moved)))
            return
        self._again_ns = now_ns + self._rules.silence_ns
        self.say_again()

    def say_again(self) -> None:
        """What is not heeded may not have been heard."""
        if self._said:
            self._said = -1, self._said[1]
        self._wish_term = -1
        self._consider()

    @property
    def _due_ns(self) -> int:
        return min(self._deadline_ns, self._stuck_ns) if self._has_moved else self._deadline_ns

    def give_up(self, reason: str) -> None:
        """The store is lost for good."""
        if self._place != _MemberPhase.OVER:
            self._is_left_working = self._place == _MemberPhase.WORKING
            self._tell_last(RendezvousBroken(reason))

    def cut_off(self, reason: str) -> None:
        """For too long nothing was heard of the store: the others will have taken this node for dead."""
        if self.is_working:
            self._is_left_working = False
            self._tell(Ejected(reason), _MemberPhase.OVER if self.is_over else _MemberPhase.IDLE)

    def lose_sight(self, broke_now: bool) -> None:
        """The store is lost; unless it has broken for all, what was said may be heeded all the same."""
        state = self._state
        if self._place == _MemberPhase.JOINING and self._said and state and state.roster and not broke_now:
            self._pending = state.roster.number

    def move(self, now_ns: int, elsewhere: bool) -> None:
        """There is a store again, that one or another."""
        self.says.clear()  # it is said again, with what is known by then
        if elsewhere:
            self._has_moved = True
            self._stuck_ns = now_ns + 2 * self._rules.silence_ns + STUCK_NS
            self._promised = max(self._promised, self._pending)
            if self._said:
                self._floor = max(self._floor, self._said[1] + 1)
        self._pending = -1

    def forget(self, reason: str) -> None:
        """The job is another one than this node has seen so far."""
        self._state, self._said = None, None
        self._number, self._floor, self._roster_key = -1, -1, None
        self._promised = -1
        self._ending = None
        if self._place == _MemberPhase.WORKING:
            self._tell(Ejected(reason), _MemberPhase.IDLE)
        elif self._place == _MemberPhase.JOINING:
            self.tells.append(Notice(reason))

    # What is seen

    def see(self, state: JobState, roster: Sequence[Node] | None = None) -> None:
        """The state is this. With the roster, if `wants_roster` has asked for it."""
        self._state, self._has_moved = state, state.has_moved
        self._consider(roster)

    def _consider(self, roster: Sequence[Node] | None = None) -> None:
        self.wants_roster = False
        state = self._state
        if state is None:
            return
        match self._place:
            case _MemberPhase.JOINING:
                self._consider_joining(state, roster)
            case _MemberPhase.WORKING:
                self._consider_working(state)
            case _MemberPhase.IDLE:
                self._consider_end(state)
        if not self.is_over and self._wish and self._wish_term != state.term:
            self._wish_term = state.term
            self._wish = replace(self._wish, seq=self._next_seq())
            self.says.append(self._wish)

    def _consider_end(self, state: JobState) -> bool:
        if state.phase == JobPhase.CLOSED:
            self._tell_last(JobClosed(state.reason, state.failure))
        elif state.phase == JobPhase.COMPLETED:
            if self._roster_key == state.roster and self._place == _MemberPhase.WORKING:
                self._tell_last(AllSucceeded(state.number))
            else:
                self._tell_last(JobClosed("the job has completed", completed=True))
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
            self._tell_last(RendezvousBroken(f"{self._node.host} cannot take part: {refusal}"))
            return
        if state.phase == JobPhase.FORMING:
            self._say_join(state, state.number - 1)
            self._show(state)
            return
        if self._said is not None and self._said[1] < state.number:
            if roster is None:
                self.wants_roster = True
                return
            ids = [node.id for node in roster]
            if self._node.id in ids:
                self.wants_lease = not self.has_lease
                if self.wants_lease:
                    return
                self._begin(state, tuple(roster), ids.index(self._node.id))
                return
        self._say_join(state, state.number)

    def _begin(self, state: JobState, roster: tuple[Node, ...], group_rank: int) -> None:
        self._number, self._roster_key, self._nodes = state.number, state.roster, roster
        began = Round(state.number, roster, group_rank, state.restarts, state.changes, state.job)
        self._tell(RoundBegan(began), _MemberPhase.WORKING)

    def _consider_working(self, state: JobState) -> None:
        assert self._node is not None
        if self._consider_end(state) or (
            state.phase == JobPhase.RUNNING and state.roster == self._roster_key
        ):
            return
        if isinstance(self._wish, LeaveNotice):
            return  # the others wait for the workers that are still here
        cause = state.cause
        if state.phase == JobPhase.FORMING and state.number == self._number + 1 and cause is not None:
            why = self._why_lost(cause)
            if not why:
                self._tell(RoundEnded(self._number, cause), _MemberPhase.IDLE)
                return
        else:
            why = "this node was not heard of in time"
        self._tell(Ejected(f"the others went on without {self._node.host}: {why}"), _MemberPhase.IDLE)

    def _why_lost(self, cause: Cause | None) -> str:
        """Why the others take this node for lost, if they do."""
        if not isinstance(cause, NodesLost) or self._node is None:
            return ""
        return cause.reason if self._node.id in cause.ids(self._nodes) else ""

    # Saying and telling

    def _say_join(self, state: JobState, after: int) -> None:
        assert self._node is not None
        after = max(after, self._number, self._floor)  # a store that lost its memory may be behind
        if self._said != (state.term, after):
            self._said = state.term, after
            self.says.append(JoinRequest(self._next_seq(), self._node, after, self._promised))

    def _wish_for(self, wish: Message) -> None:
        self._wish = wish
        if self._state:
            self._wish_term = self._state.term
            self.says.append(wish)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _tell(self, event: RendezvousEvent, place: _MemberPhase) -> None:
        self._place = place
        if not isinstance(self._wish, LeaveNotice):
            self._wish = None
        self._shown = ""
        self.tells.append(event)

    def _tell_last(self, event: RendezvousEvent) -> None:
        self._ending = None
        self._tell(event, _MemberPhase.OVER)

    def _is_spare(self) -> bool:
        if self._has_moved:
            return False
        return self._state is not None and self._node is not None and self._node.id in self._state.spares

    def _show(self, state: JobState) -> None:
        text = waits_for(self._rules, state)
        if text and text != self._shown:
            self._shown = text
            self.tells.append(Notice(text))
