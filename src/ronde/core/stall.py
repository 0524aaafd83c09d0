"""When something counts as stalled, whom to ask about it, what to report or give up. One `Inspector` per rank. Pure.

What stalls is a tensor of the engine, or a call on a communicator: both are a `Tensor` here.

Rules

1. Every rank watches what it has submitted itself. What has been pending for `warning_ns` is stalled: the rank asks all
   others (their watch threads answer without their interpreters), then those that hold things up for their stacks, and
   reports. It reports the same again after `GROWTH` times as long, and so on; if something else stalls, at once.
2. Several ranks notice at about the same time. A rank that is asked about a tensor before it has asked itself leaves
   the report to the one that asks; of those that have asked each other the lowest reports.
3. After `shutdown_ns` the communicator is aborted. No rank leaves that to another one.
4. Who holds things up: a rank that has not submitted the tensor; a rank whose engine is behind the others', because its
   thread has come to fewer collective calls and rounds of negotiation, or is still in one (the interpreter does not let
   it on); a rank that does not answer at all, whose process must be stopped. If one does not answer, those that are
   behind may be waiting for it. If none does, the tensor may just take long: the first report is left out.
5. The own view may be old: a rank that finds itself behind, or in the middle of a round in which tensors are run, asks
   again a second later, and so does one whose interpreter kept it from looking in time (`postpone_inspection`). What is
   no longer pending when the answers are there is not reported.
6. Ranks that wait for each other in a circle (`circles`) are reported at once, by the lowest of them. To find out, a
   rank asks about what it has awaited for `SUSPICION_NS`, then at doubling distances. If a rank that has not submitted
   it sleeps itself, it asks all about what the others sleep in. What a rank says twice that it sleeps in, it slept in
   between the two questions, and so did all others then: the circle was whole. Unless another thread submits what is
   missing, that is a deadlock; so it is a report and no error.
7. A rank in join() waits for those that have not joined, and that may be right for hours. So a join is as old as the
   time in which the engine has run nothing; and no report is made of it while a rank that has not joined sleeps for
   something itself, as that rank reports what it waits for.

Theory of operation

There is at most one inquiry at a time: ASKING (until all have answered or the patience ends), once more for a circle,
then for a report LISTENING for stacks, then done. `step` takes what is pending now along with each event, and sets
`wake_ns`, the time by which it wants to be called again even if nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from ronde.core.circles import circle_through, entangled_with
from ronde.core.stall_events import (
    Abort,
    Answer,
    AskAbout,
    Asked,
    AskForStacks,
    AskRanks,
    Blocked,
    Effect,
    Event,
    Pending,
    Report,
    Stall,
    StalledTensor,
    Tensor,
)

__all__ = ["JOIN", "MOST_STACKS", "Inspector"]

ANSWER_PATIENCE_NS = 2 * 10**9  # a watch thread that can run answers within milliseconds
STACKS_PATIENCE_NS = 2 * 10**9
AGAIN_NS = 10**9
SLACK_NS = 10**9  # tensors that stall within a second of each other stall together
SUSPICION_NS = 10**9
GROWTH = 6  # with 10 s: reports after 10 s, 1 min, 6 min, 36 min
MOST_STACKS = 8  # of so many ranks; a report is to be read by people
MOST_TENSORS = 1024  # Stalls::kMostIds of cpp/stalls.h
JOIN = "join"  # the kind of a wait in join(); kJoin of cpp/engine/cycle_waits.h


class _Purpose(Enum):
    SUSPECT = auto()  # do ranks wait for each other?
    REPORT = auto()
    ABORT = auto()


@dataclass(slots=True)
class _Inquiry:
    number: int
    tensors: list[Tensor]
    purpose: _Purpose
    deadline_ns: int
    answers: dict[int, Answer] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)  # ids that a lower rank reports
    blocked: dict[int, Blocked] = field(default_factory=dict)  # what others sleep in, if asked about
    about_blocked: dict[int, Answer] = field(default_factory=dict)
    stall: Stall | None = None  # once the answers have been judged
    stacks: dict[int, str] = field(default_factory=dict)


class _Known(NamedTuple):
    """What has been reported. `since_ns`: None if this rank has not seen it yet."""

    since_ns: int | None
    due_ns: int | None = None  # when this rank reports it again; None: another rank does


class Inspector:
    """One rank's part. `warning_ns`, `shutdown_ns`: the limits; 0: never."""

    def __init__(self, rank: int, size: int, warning_ns: int, shutdown_ns: int) -> None:
        self._rank, self._size = rank, size
        self._warning_ns, self._shutdown_ns = warning_ns, shutdown_ns
        self._limit_ns = min(limit for limit in (warning_ns, shutdown_ns, 2**62) if limit)
        self._slack_ns = min(SLACK_NS, self._limit_ns // 4)
        self._known: dict[int, _Known] = {}  # by id
        self._suspect_at_ns: dict[
            int, tuple[int, int]
        ] = {}  # by id: since when it is pending, when to ask again
        self._inquiry: _Inquiry | None = None
        self._inquiries = 0
        self._not_before_ns = 0
        self._claimed: set[int] = set()  # ids about which this rank is going to ask again
        self.wake_ns: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it never does anything, because both limits are 0."""
        return not (self._warning_ns or self._shutdown_ns)

    @property
    def old_ns(self) -> int:
        """So old are the tensors that `step` wants to see."""
        together_ns = self._limit_ns - self._slack_ns
        return min(together_ns, self._suspicion_ns) if self._suspicion_ns else together_ns

    @property
    def known(self) -> list[int]:
        """The ids of tensors that `step` wants to see whatever their age."""
        return list(self._known)

    @property
    def _suspicion_ns(self) -> int:
        return min(SUSPICION_NS, self._warning_ns)

    def step(self, now_ns: int, pending: Pending, event: Event | None = None) -> list[Effect]:
        """Return what to do. `pending`: seen after `now_ns` was read."""
        self._forget_ended(pending)
        if event is not None:
            self._note_event(event)
        effects = self._continue_inquiry(now_ns, pending)
        if self._inquiry is None:
            effects += self._begin_inquiry(now_ns, pending)
        self.wake_ns = self._next_step_ns(pending)
        return effects

    def postpone_inspection(self, now_ns: int) -> None:
        """What it sees now is from before a pause: what was to be done meanwhile may just be happening."""
        self._not_before_ns = now_ns + AGAIN_NS

    def _forget_ended(self, pending: Pending) -> None:
        """Keep of what is reported or suspected only what is still pending since then."""
        since = {tensor.id: tensor.since_ns for tensor in pending.tensors}
        self._known = {
            each: was._replace(since_ns=since[each])
            for each, was in self._known.items()
            if each in since and was.since_ns in (None, since[each])
        }
        self._suspect_at_ns = {
            each: was for each, was in self._suspect_at_ns.items() if since.get(each) == was[0]
        }

    def _note_event(self, event: Event) -> None:
        inquiry = self._inquiry
        if isinstance(event, Asked):
            self._leave_report_to(event)
        elif inquiry is not None and event.inquiry == inquiry.number:
            if isinstance(event, Answer):
                (inquiry.about_blocked if inquiry.blocked else inquiry.answers)[event.rank] = event
            else:
                inquiry.stacks[event.rank] = event.text

    def _leave_report_to(self, asked: Asked) -> None:
        """Another rank asks: whose report will it be?"""
        own = self._inquiry
        ours = {tensor.id for tensor in own.tensors} if own is not None else set()
        for each in asked.ids:
            if own is None and each in self._claimed and asked.rank > self._rank:
                continue  # that rank has left it to this one
            if own is None or each not in ours or own.purpose is _Purpose.SUSPECT:
                self._known.setdefault(each, _Known(None))
            elif asked.rank < self._rank and own.purpose is _Purpose.REPORT:
                own.dropped.add(each)
                self._known[each] = _Known(None)

    # An inquiry begins

    def _begin_inquiry(self, now_ns: int, pending: Pending) -> list[Effect]:
        if now_ns < self._not_before_ns:
            return []
        for purpose, choose in (
            (_Purpose.ABORT, self._to_abort),
            (_Purpose.REPORT, self._to_report),
            (_Purpose.SUSPECT, self._to_suspect),
        ):
            if tensors := choose(now_ns, pending.tensors)[:MOST_TENSORS]:
                self._inquiries += 1
                self._inquiry = _Inquiry(self._inquiries, tensors, purpose, now_ns + ANSWER_PATIENCE_NS)
                ids = tuple(tensor.id for tensor in tensors)
                return [AskRanks(self._inquiries, ids, purpose is _Purpose.SUSPECT)]
        return []

    def _to_abort(self, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        return self._older_than(self._shutdown_ns, now_ns, tensors)

    def _to_report(self, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What has stalled and is not reported, with what is about to; and what is due again."""
        fresh, due = [], []
        for tensor in tensors:
            known = self._known.get(tensor.id)
            if known is None:
                fresh.append(tensor)
            elif known.due_ns is not None and now_ns >= known.due_ns:
                due.append(tensor)
        if self._older_than(self._warning_ns, now_ns, fresh):
            due += self._older_than(self._warning_ns - self._slack_ns, now_ns, fresh)
        return due

    def _to_suspect(self, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What a thread waits for, if it is time to ask whether that is in vain."""
        if not self._warning_ns:
            return []
        chosen = []
        for tensor in tensors:
            age_ns = now_ns - tensor.since_ns
            if tensor.id in self._known or age_ns < self._suspicion_ns:
                continue
            if now_ns >= self._suspect_at_ns.get(tensor.id, (0, 0))[1]:
                self._suspect_at_ns[tensor.id] = tensor.since_ns, now_ns + age_ns
                if tensor.is_awaited:
                    chosen.append(tensor)
        return chosen

    def _older_than(self, limit_ns: int, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if limit_ns and now_ns - tensor.since_ns >= limit_ns]

    # It goes on

    def _continue_inquiry(self, now_ns: int, pending: Pending) -> list[Effect]:
        inquiry = self._inquiry
        if inquiry is None:
            return []
        effects: list[Effect] = []
        if inquiry.stall is None:
            answers = inquiry.about_blocked if inquiry.blocked else inquiry.answers
            if len(answers) < self._size and now_ns < inquiry.deadline_ns:
                return []
            if inquiry.purpose is _Purpose.SUSPECT and not inquiry.blocked:
                if asks := self._ask_about_others(inquiry, now_ns, pending):
                    return asks
            else:
                inquiry.stall = self._judge_answers(inquiry, now_ns, pending)
            if inquiry.stall is not None and inquiry.purpose is not _Purpose.ABORT:
                inquiry.deadline_ns = now_ns + STACKS_PATIENCE_NS
                effects += [AskForStacks(inquiry.number, rank) for rank in self._ranks_to_show(inquiry.stall)]
        if inquiry.stall is None:
            self._inquiry = None
        elif inquiry.purpose is _Purpose.ABORT:
            self._inquiry = None
            self._shutdown_ns = 0  # once is enough
            effects.append(Abort(inquiry.stall))
        elif not self._ranks_to_show(inquiry.stall) - inquiry.stacks.keys() or now_ns >= inquiry.deadline_ns:
            self._inquiry = None
            effects += self._make_report(inquiry, inquiry.stall, now_ns, pending)
        return effects

    def _ranks_to_show(self, stall: Stall) -> set[int]:
        return set(stall.culprits[:MOST_STACKS]) - {self._rank}

    def _still_pending(self, inquiry: _Inquiry, pending: Pending) -> dict[int, Tensor]:
        """What the inquiry is about and is still pending, as it is now."""
        now = {(tensor.id, tensor.since_ns): tensor for tensor in pending.tensors}
        asked = [
            (tensor.id, tensor.since_ns) for tensor in inquiry.tensors if tensor.id not in inquiry.dropped
        ]
        return {key[0]: now[key] for key in asked if key in now}

    def _judge_answers(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """Who holds things up? None if nothing does any more, or if that cannot be told now."""
        still = self._still_pending(inquiry, pending)
        answers = inquiry.answers
        if not still or self._rank not in answers:
            return None
        if inquiry.purpose is _Purpose.SUSPECT:
            return self._judge_circle(inquiry, now_ns, pending)
        silent = tuple(rank for rank in range(self._size) if rank not in answers)
        behind = () if silent else self._ranks_behind(answers)
        stall = replace(self._stall_from_answers(inquiry, now_ns, still), behind=behind, silent=silent)
        has_no_culprit = not silent and (not stall.culprits or self._is_left_to_others(stall, answers))
        is_new = stall.age_ns < self._long_ns(inquiry.purpose)
        in_round = answers[self._rank].is_in_round and not silent and not behind
        if self._rank in behind or (in_round and is_new):
            self._not_before_ns = now_ns + AGAIN_NS
            self._claimed = set(still)
            return None
        if has_no_culprit and is_new and inquiry.purpose is _Purpose.REPORT:  # it may just take long
            self._remember_reported(still, now_ns)
            return None
        return stall

    def _long_ns(self, purpose: _Purpose) -> int:
        """How old something is that no rank holds up, and that hangs all the same, in a library perhaps."""
        return GROWTH * self._warning_ns if purpose is _Purpose.REPORT else self._shutdown_ns + 2 * AGAIN_NS

    def _ranks_behind(self, answers: dict[int, Answer]) -> tuple[int, ...]:
        progress = {rank: answer.progress for rank, answer in answers.items()}
        least = min(progress.values())
        if least == max(progress.values()):
            return ()
        return tuple(sorted(rank for rank in progress if progress[rank] == least))

    def _is_left_to_others(self, stall: Stall, answers: dict[int, Answer]) -> bool:
        """Whether all that stalls is a join, and a rank that has not joined waits for something itself."""
        return all(
            waiting.tensor.kind == JOIN and any(answers[rank].blocked for rank in waiting.missing)
            for waiting in stall.tensors
        )

    def _awaited_stall(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """What threads of this rank sleep for since before the inquiry."""
        still = self._still_pending(inquiry, pending)
        awaited = {each: tensor for each, tensor in still.items() if tensor.is_awaited}
        return self._stall_from_answers(inquiry, now_ns, awaited) if awaited else None

    def _ask_about_others(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> list[Effect]:
        """If this rank waits for one that waits itself, there may be a circle."""
        stall = self._awaited_stall(inquiry, now_ns, pending)
        sleeping = {
            rank: answer.blocked
            for rank, answer in inquiry.answers.items()
            if answer.blocked is not None and rank != self._rank
        }
        if stall is None or not sleeping.keys() & set(stall.culprits):
            return []
        self._inquiries += 1
        inquiry.number, inquiry.deadline_ns = self._inquiries, now_ns + ANSWER_PATIENCE_NS
        inquiry.blocked = sleeping
        return [AskAbout(inquiry.number, tuple(sleeping.values()))]

    def _judge_circle(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """Does this rank wait for itself, by way of others that wait?"""
        stall = self._awaited_stall(inquiry, now_ns, pending)
        answers = inquiry.about_blocked
        if stall is None or self._rank not in answers:
            return None
        behind = self._ranks_behind(
            answers
        )  # these may sleep because they have not heard yet that it is over
        waits_for = {self._rank: set(stall.culprits)}
        for index, (rank, blocked) in enumerate(inquiry.blocked.items()):
            if rank in answers and answers[rank].blocked == blocked and rank not in behind:
                waits_for[rank] = {
                    other for other, answer in answers.items() if not all(answer.has[index : index + 1])
                }
        circle = circle_through(self._rank, waits_for)
        if not circle:
            return None
        blocked_here = tuple(waiting for waiting in stall.tensors if circle[1] in waiting.missing)
        if min(entangled_with(self._rank, waits_for)) < self._rank:  # it reports
            reported = {waiting.tensor.id: waiting.tensor for waiting in blocked_here}
            self._known |= {each: _Known(tensor.since_ns) for each, tensor in reported.items()}
            return None
        return replace(stall, tensors=blocked_here, circle=circle)

    def _stall_from_answers(self, inquiry: _Inquiry, now_ns: int, still: dict[int, Tensor]) -> Stall:
        """What the answers say of these tensors."""
        waiting = []
        for index, asked in enumerate(inquiry.tensors):
            if (tensor := still.get(asked.id)) is None:
                continue
            has = {
                rank: tensor.is_running or any(answer.has[index : index + 1])
                for rank, answer in inquiry.answers.items()
            }
            submitted = tuple(sorted(rank for rank in has if has[rank]))
            waiting.append(StalledTensor(tensor, submitted, tuple(sorted(set(has) - set(submitted)))))
        age_ns = now_ns - min(tensor.since_ns for tensor in still.values())
        states = {rank: answer.state for rank, answer in inquiry.answers.items() if answer.state}
        return Stall(age_ns, tuple(waiting), states=states)

    def _make_report(self, inquiry: _Inquiry, stall: Stall, now_ns: int, pending: Pending) -> list[Effect]:
        still = self._still_pending(inquiry, pending)
        tensors = tuple(waiting for waiting in stall.tensors if waiting.tensor.id in still)
        if not tensors:
            return []
        reported = {waiting.tensor.id: still[waiting.tensor.id] for waiting in tensors}
        self._remember_reported(reported, now_ns)
        oldest = min(reported.values(), key=lambda tensor: tensor.since_ns)
        due_ns = self._known[oldest.id].due_ns or 0
        return [
            Report(replace(stall, tensors=tensors, stacks=inquiry.stacks, next_ns=due_ns - oldest.since_ns))
        ]

    def _remember_reported(self, reported: dict[int, Tensor], now_ns: int) -> None:
        """These are reported; the next report follows when they are much older."""
        for each, tensor in reported.items():
            age_ns = self._warning_ns
            while tensor.since_ns + age_ns <= now_ns + self._slack_ns:
                age_ns *= GROWTH
            self._known[each] = _Known(tensor.since_ns, tensor.since_ns + age_ns)

    def _next_step_ns(self, pending: Pending) -> int | None:
        if self._inquiry is not None:
            return self._inquiry.deadline_ns
        limit_ns = min(self._limit_ns, self._suspicion_ns or self._limit_ns)
        times = [] if pending.next_ns < 0 else [pending.next_ns + limit_ns]
        for tensor in pending.tensors:
            known = self._known.get(tensor.id)
            if known is not None and known.due_ns is not None:
                times.append(known.due_ns)
            if self._warning_ns and known is None:
                times.append(tensor.since_ns + self._warning_ns)
                times.append(self._suspect_at_ns.get(tensor.id, (0, tensor.since_ns + self._suspicion_ns))[1])
            if self._shutdown_ns:
                times.append(tensor.since_ns + self._shutdown_ns)
        return max(min(times), self._not_before_ns) if times else None
