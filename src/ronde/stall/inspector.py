"""Decides when an operation counts as stalled, which ranks to ask, and what to report or abort. Pure.

Each rank has one `Inspector`. A tensor of the engine and a call on a communicator can stall; both are a `Tensor` here.

Rules

1. Every rank watches its own operations. An operation that has been pending for `warning_ns` is stalled: the rank asks
   all others (their watch threads answer without the interpreter), then asks those that delay the operation for their
   stacks, and reports. It reports the same operation again after `GROWTH` times as long, and so on; a further operation
   that stalls, at once.
2. Several ranks notice a stall at about the same time. A rank that is asked about a tensor before it has asked leaves
   the report to the rank that asks; of ranks that have asked each other, the lowest one reports.
3. After `shutdown_ns` the communicator is aborted. No rank leaves that to another one.
4. These ranks delay an operation: a rank that has not submitted it; a rank whose engine is behind the others', because
   its thread has reached fewer collective calls and negotiation rounds, or is still in one (the interpreter does not
   let it run); and a rank that does not answer, whose process is probably stopped. If one does not answer, those that
   are behind may be waiting for it. If no rank delays the operation, it may just take long: the first report is left
   out.
5. A rank's view may be out of date: a rank that finds itself behind, or in the middle of a negotiation round in which
   tensors run, asks again a second later. So does a rank whose interpreter kept it from looking in time
   (`postpone_inspection`). An operation that ends before the answers arrive is not reported.
6. Ranks that wait for each other in a circle are reported at once, by the lowest of them. To find a circle,
   a rank asks about an operation that a thread has awaited for `SUSPICION_NS`, then at doubling intervals. If a rank
   that has not submitted it sleeps, too, this rank asks all ranks about the operations that the others sleep in. If a
   rank names the same operation in both answers, it slept in it between the two questions; if all ranks of a circle do,
   the circle existed at that time. It is a deadlock unless another thread submits a missing operation, so Ronde reports
   it and raises no error.
7. A rank in join() waits for the ranks that have not joined, perhaps rightly for hours. So the age of a join is the
   time since the engine last ran a tensor, and the rank does not report it while a rank that has not joined sleeps in
   another operation: that rank reports its own wait.

Theory of operation

There is at most one inquiry at a time. It is ASKING until all ranks have answered or its patience ends, asks a second
time for a circle, then LISTENS for the stacks of a report. `step` takes what is pending now along with each event, and
sets `wake_ns`, the time of the next call if no event comes before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

__all__ = [
    "JOIN",
    "MOST_STACKS",
    "Abort",
    "Answer",
    "AskAboutWaits",
    "AskForStacks",
    "AskAboutTensors",
    "Asked",
    "Blocked",
    "Effect",
    "Event",
    "Inspector",
    "Pending",
    "Report",
    "Stacks",
    "Stall",
    "StalledTensor",
    "Tensor",
    "circle_through",
    "entangled_with",
]

ANSWER_PATIENCE_NS = 2 * 10**9  # a watch thread that can run answers within milliseconds
STACKS_PATIENCE_NS = 2 * 10**9
AGAIN_NS = 10**9
SLACK_NS = 10**9  # tensors that stall within a second of each other stall together
SUSPICION_NS = 10**9
GROWTH = 6  # with 10 s: reports after 10 s, 1 min, 6 min, 36 min
MOST_STACKS = 8  # ranks; a longer report is hard to read
MOST_TENSORS = 1024  # Stalls::kMostIds of cpp/waiting/stalls.h
JOIN = "join"  # the kind of a wait in join(); kJoin of cpp/engine/cycle_waits.h


# What is pending


class Tensor(NamedTuple):
    """A tensor or call that this rank has submitted and that is pending. `id` stands for the name.

    `is_running`: all ranks have submitted it. `is_awaited`: a thread of this rank sleeps until it is done.
    """

    id: int
    name: str
    kind: str
    since_ns: int
    is_running: bool = False
    is_awaited: bool = False


class Pending(NamedTuple):
    """What this rank waits for: tensors that are old or known to the inspector.

    `next_ns`: when the oldest of the other tensors was submitted; -1 if there are none.
    """

    tensors: Sequence[Tensor] = ()
    next_ns: int = -1


class Blocked(NamedTuple):
    """The longest wait of a process: for the operation `id` on the communicator `where`, by its host's clock."""

    where: int
    id: int
    since_ns: int


# Events


@dataclass(frozen=True, slots=True)
class Asked:
    """Another rank asks about these tensors."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a rank, perhaps this one, to a question about tensors. `has`: whether it has begun each of them.

    `calls`: the collective calls and negotiation rounds that its engine's thread has reached. `is_in_round`: it is in
    a negotiation round, or should be. `state`: its progress and what it waits for, in words. `blocked`: its longest
    wait, if it waits.
    """

    rank: int
    inquiry: int
    calls: int
    is_in_round: bool
    has: tuple[bool, ...]
    state: str = ""
    blocked: Blocked | None = None

    @property
    def progress(self) -> tuple[int, bool]:
        """A value that grows while the engine makes progress."""
        return self.calls, not self.is_in_round


@dataclass(frozen=True, slots=True)
class Stacks:
    """A rank's stacks have arrived."""

    rank: int
    inquiry: int
    text: str


Event = Asked | Answer | Stacks


# Effects


@dataclass(frozen=True, slots=True)
class AskAboutTensors:
    """Ask all ranks, including this one, about these tensors.

    `is_suspicion`: the question announces no report, so other ranks do not leave theirs to this rank.
    """

    inquiry: int
    ids: tuple[int, ...]
    is_suspicion: bool = False


@dataclass(frozen=True, slots=True)
class AskAboutWaits:
    """Ask all ranks, including this one, whether they have begun the operations that other processes wait for."""

    inquiry: int
    blocked: tuple[Blocked, ...]


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Ask a rank for the stacks of its threads."""

    inquiry: int
    rank: int


class StalledTensor(NamedTuple):
    """A stalled tensor, and of the ranks that have answered those that have submitted it and those that have not."""

    tensor: Tensor
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """The facts of a report.

    `age_ns`: of the oldest tensor. `behind`: ranks whose engine is behind the others'. `silent`: ranks that do not
    answer. `circle`: ranks of which each waits for the next one, and the last for the first, this rank. `states`: of
    culprits, by rank; `stacks`: by rank. `next_ns`: the age at which the next report follows; 0: never.
    """

    age_ns: int
    tensors: tuple[StalledTensor, ...]
    behind: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    circle: tuple[int, ...] = ()
    states: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    next_ns: int = 0

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that delay the others and answer; those on the circle first."""
        missing = {rank for waiting in self.tensors for rank in waiting.missing}
        others = self.circle[1:]
        return (*others, *sorted((missing | set(self.behind)) - set(others)))

    def renamed(self, names: Sequence[int]) -> Stall:
        """Return the same with the numbers of ranks in messages: names[rank]."""

        def of(ranks: Iterable[int]) -> tuple[int, ...]:
            return tuple(names[rank] for rank in ranks)

        tensors = tuple(
            StalledTensor(each.tensor, of(each.submitted), of(each.missing)) for each in self.tensors
        )
        states, stacks = (
            {names[rank]: text for rank, text in texts.items()} for texts in (self.states, self.stacks)
        )
        ranks = of(self.behind), of(self.silent), of(self.circle)
        return Stall(self.age_ns, tensors, *ranks, states, stacks, self.next_ns)


@dataclass(frozen=True, slots=True)
class Report:
    """Log the warning."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the communicator: an operation has waited longer than the user allows."""

    stall: Stall


Effect = AskAboutTensors | AskAboutWaits | AskForStacks | Report | Abort


# The inspector


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
    stall: Stall | None = None  # after the answers
    stacks: dict[int, str] = field(default_factory=dict)


class _Known(NamedTuple):
    """A reported tensor. `since_ns`: when it was submitted; None if this rank has not seen it yet."""

    since_ns: int | None
    due_ns: int | None = None  # when this rank reports it again; None: another rank does


class Inspector:
    """Inspects the operations of one rank. `warning_ns`, `shutdown_ns`: the limits; 0: never."""

    def __init__(self, rank: int, size: int, warning_ns: int, shutdown_ns: int) -> None:
        self._rank, self._size = rank, size
        self._warning_ns, self._shutdown_ns = warning_ns, shutdown_ns
        self._limit_ns = min(limit for limit in (warning_ns, shutdown_ns, 2**62) if limit)
        self._slack_ns = min(SLACK_NS, self._limit_ns // 4)
        self._known: dict[int, _Known] = {}  # by id
        # By id: since when it is pending, and when to ask again.
        self._suspect_at_ns: dict[int, tuple[int, int]] = {}
        self._inquiry: _Inquiry | None = None
        self._inquiries = 0
        self._not_before_ns = 0
        self._claimed: set[int] = set()  # ids about which this rank is going to ask again
        self.wake_ns: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the inspector never acts, because both limits are 0."""
        return not (self._warning_ns or self._shutdown_ns)

    @property
    def old_ns(self) -> int:
        """The age from which on `step` wants to see tensors."""
        together_ns = self._limit_ns - self._slack_ns
        return min(together_ns, self._suspicion_ns) if self._suspicion_ns else together_ns

    @property
    def known(self) -> list[int]:
        """The ids of tensors that `step` wants to see at any age."""
        return list(self._known)

    @property
    def _suspicion_ns(self) -> int:
        return min(SUSPICION_NS, self._warning_ns)

    def step(self, now_ns: int, pending: Pending, event: Event | None = None) -> list[Effect]:
        """Return what to do. `pending`: read after `now_ns`."""
        self._forget_ended(pending)
        if event is not None:
            self._note_event(event)
        effects = self._continue_inquiry(now_ns, pending)
        if self._inquiry is None:
            effects += self._begin_inquiry(now_ns, pending)
        self.wake_ns = self._next_step_ns(pending)
        return effects

    def postpone_inspection(self, now_ns: int) -> None:
        """Wait for `AGAIN_NS` before the next inquiry: after a pause, pending work may still catch up."""
        self._not_before_ns = now_ns + AGAIN_NS

    def _forget_ended(self, pending: Pending) -> None:
        """Forget reported and suspected tensors that are no longer pending since the same time."""
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
        """Another rank asks about tensors: leave the report to it, unless this rank has precedence."""
        own = self._inquiry
        ours = {tensor.id for tensor in own.tensors} if own is not None else set()
        for each in asked.ids:
            if own is None and each in self._claimed and asked.rank > self._rank:
                continue  # that rank leaves the report to this one
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
                return [AskAboutTensors(self._inquiries, ids, purpose is _Purpose.SUSPECT)]
        return []

    def _to_abort(self, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        return self._older_than(self._shutdown_ns, now_ns, tensors)

    def _to_report(self, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors that have stalled and those that are about to, and tensors whose next report is due."""
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
        """Return tensors that a thread waits for, when it is time to look for a circle."""
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

    # An inquiry continues

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
        """Return the tensors of the inquiry that are still pending, in their present state."""
        now = {(tensor.id, tensor.since_ns): tensor for tensor in pending.tensors}
        asked = [
            (tensor.id, tensor.since_ns) for tensor in inquiry.tensors if tensor.id not in inquiry.dropped
        ]
        return {key[0]: now[key] for key in asked if key in now}

    def _judge_answers(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """Return what the answers show. None if there is nothing to report, or nothing reliable yet."""
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
        # The operation may just take long.
        if has_no_culprit and is_new and inquiry.purpose is _Purpose.REPORT:
            self._remember_reported(still, now_ns)
            return None
        return stall

    def _long_ns(self, purpose: _Purpose) -> int:
        """Return the age from which on a tensor that no rank delays counts as stalled, perhaps in a library."""
        return GROWTH * self._warning_ns if purpose is _Purpose.REPORT else self._shutdown_ns + 2 * AGAIN_NS

    def _ranks_behind(self, answers: dict[int, Answer]) -> tuple[int, ...]:
        progress = {rank: answer.progress for rank, answer in answers.items()}
        least = min(progress.values())
        if least == max(progress.values()):
            return ()
        return tuple(sorted(rank for rank in progress if progress[rank] == least))

    def _is_left_to_others(self, stall: Stall, answers: dict[int, Answer]) -> bool:
        """Return whether only joins stall, and a rank that has not joined waits for another operation."""
        return all(
            waiting.tensor.kind == JOIN and any(answers[rank].blocked for rank in waiting.missing)
            for waiting in stall.tensors
        )

    def _awaited_stall(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """Return the stall of those tensors that threads of this rank have slept for since before the inquiry."""
        still = self._still_pending(inquiry, pending)
        awaited = {each: tensor for each, tensor in still.items() if tensor.is_awaited}
        return self._stall_from_answers(inquiry, now_ns, awaited) if awaited else None

    def _ask_about_others(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> list[Effect]:
        """Ask about the waits of other ranks: if this rank waits for a waiting rank, there may be a circle."""
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
        return [AskAboutWaits(inquiry.number, tuple(sleeping.values()))]

    def _judge_circle(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """Return the stall if this rank is on a circle of waiting ranks and has to report it."""
        stall = self._awaited_stall(inquiry, now_ns, pending)
        answers = inquiry.about_blocked
        if stall is None or self._rank not in answers:
            return None
        # These may sleep because they do not know yet that the operation is complete.
        behind = self._ranks_behind(answers)
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
        if min(entangled_with(self._rank, waits_for)) < self._rank:  # that rank reports
            reported = {waiting.tensor.id: waiting.tensor for waiting in blocked_here}
            self._known |= {each: _Known(tensor.since_ns) for each, tensor in reported.items()}
            return None
        return replace(stall, tensors=blocked_here, circle=circle)

    def _stall_from_answers(self, inquiry: _Inquiry, now_ns: int, still: dict[int, Tensor]) -> Stall:
        """Return the stall of these tensors, as the answers describe it."""
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
        """Record that these tensors are reported, and when the next report is due."""
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


# Circles. A rank waits for all ranks that have not begun its operation, until the last of them begins it. So ranks that
# wait for each other in a circle never continue.

WaitsFor = Mapping[int, Collection[int]]  # by waiting rank: the ranks it waits for


def circle_through(rank: int, waits_for: WaitsFor) -> tuple[int, ...]:
    """Return the shortest circle of ranks, each waiting for the next, that begins with this rank; () if none does."""
    came_from: dict[int, int] = {}
    queue = deque([rank])
    while queue and rank not in came_from:
        current = queue.popleft()
        for other in sorted(waits_for.get(current, ())):
            if other not in came_from:
                came_from[other] = current
                queue.append(other)
    if rank not in came_from:
        return ()
    circle = [came_from[rank]]
    while circle[-1] != rank:
        circle.append(came_from[circle[-1]])
    return tuple(reversed(circle))


def entangled_with(rank: int, waits_for: WaitsFor) -> set[int]:
    """Return all ranks that are on a circle with this rank; an empty set if no circle contains it."""
    waited_for_by: dict[int, set[int]] = {}
    for waiting, others in waits_for.items():
        for other in others:
            waited_for_by.setdefault(other, set()).add(waiting)
    return _reachable(rank, waits_for) & _reachable(rank, waited_for_by)


def _reachable(rank: int, edges: WaitsFor) -> set[int]:
    """Return the ranks that one or more edges lead to."""
    found: set[int] = set()
    queue = [rank]
    while queue:
        fresh = set(edges.get(queue.pop(), ())) - found
        found |= fresh
        queue += fresh
    return found
