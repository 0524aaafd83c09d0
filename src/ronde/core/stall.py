"""When tensors count as stalled, whom to ask about them, and what to report or give up. One `Inspector` per rank. Pure.

Rules

1. Every rank watches what it has submitted itself. What has been pending for `warning_ns` is stalled: the rank asks all
   others (their watch threads answer without their interpreters), then those that hold things up for their stacks, and
   reports once. It reports again only if something else stalls.
2. Several ranks notice at about the same time. Whoever is asked about a tensor before it has asked itself leaves the
   report to the one that asks; of those that have asked each other the lowest reports.
3. After `shutdown_ns` the world is aborted. No rank leaves that to another one.
4. Who holds things up: a rank that has not submitted the tensor; a rank whose engine is behind the others', because its
   thread has come to fewer collective calls and rounds of negotiation, or is still in one (the interpreter does not let
   it on); a rank that does not answer at all, whose process must be stopped. If one does not answer, those that are
   behind may be waiting for it.
5. The own view may be old: a rank that finds itself behind, or in the middle of a round in which tensors are run, asks
   again a second later. What is no longer pending when the answers are there is not reported.

Theory of operation

There is at most one inquiry at a time: ASKING (until all have answered or the patience ends), then for a report
LISTENING for stacks, then done. `step` takes what is pending now along with each event, and sets `wake_ns`, the time
by which it wants to be called again even if nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "MOST_STACKS",
    "Abort",
    "Answer",
    "Ask",
    "AskForStacks",
    "Asked",
    "Effect",
    "Event",
    "Inspector",
    "Pending",
    "Report",
    "Stacks",
    "Stall",
    "Tensor",
    "Waiting",
]

ANSWER_PATIENCE_NS = 2 * 10**9  # a watch thread that can run answers within milliseconds
STACKS_PATIENCE_NS = 2 * 10**9
AGAIN_NS = 10**9
SLACK_NS = 10**9  # tensors that stall within a second of each other stall together
MOST_STACKS = 8  # of so many ranks; a report is to be read by people
MOST_TENSORS = 2048  # Stalls::kMostIds of cpp/engine/stalls.h


class Tensor(NamedTuple):
    """Submitted by this rank and pending. `id` stands for the name; `is_running`: all ranks have submitted it."""

    id: int
    name: str
    kind: str
    since_ns: int
    is_running: bool = False


class Pending(NamedTuple):
    """What this rank waits for: tensors that are old or known to the inspector, and when the next oldest came."""

    tensors: Sequence[Tensor] = ()
    next_ns: int = -1


# Events


@dataclass(frozen=True, slots=True)
class Asked:
    """Another rank asks about these tensors."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank, or this one itself, says what it has of the tensors asked about, in their order.

    `calls`: collective calls and rounds of negotiation that its engine's thread has come to. `is_in_round`: it is in a
    round of negotiation, or should be.
    """

    rank: int
    inquiry: int
    calls: int
    is_in_round: bool
    has: tuple[bool, ...]

    @property
    def progress(self) -> tuple[int, bool]:
        """Which grows as the engine goes on."""
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
class Ask:
    """Ask all ranks, this one too, about these tensors."""

    inquiry: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Ask this rank where its threads are."""

    inquiry: int
    rank: int


class Waiting(NamedTuple):
    """A stalled tensor; of ranks that have answered, those that have submitted it and those that have not."""

    tensor: Tensor
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """What is to be told. `age_ns`: of the oldest tensor. `behind`, `silent`: ranks; `stacks`: by rank."""

    age_ns: int
    tensors: tuple[Waiting, ...]
    behind: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that hold things up and answer."""
        missing = {rank for waiting in self.tensors for rank in waiting.missing}
        return tuple(sorted(missing | set(self.behind)))

    def renamed(self, names: Sequence[int]) -> Stall:
        """Return the same with ranks as they are called in messages: names[rank]."""

        def of(ranks: Iterable[int]) -> tuple[int, ...]:
            return tuple(names[rank] for rank in ranks)

        tensors = tuple(Waiting(each.tensor, of(each.submitted), of(each.missing)) for each in self.tensors)
        stacks = {names[rank]: text for rank, text in self.stacks.items()}
        return Stall(self.age_ns, tensors, of(self.behind), of(self.silent), stacks)


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the user."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class Abort:
    """Fail the world: it has stalled longer than the user allows."""

    stall: Stall


Effect = Ask | AskForStacks | Report | Abort


@dataclass(slots=True)
class _Inquiry:
    number: int
    tensors: list[Tensor]
    is_last: bool  # the world is aborted at the end
    deadline_ns: int
    answers: dict[int, Answer] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)  # ids that a lower rank reports
    stall: Stall | None = None  # once the answers have been judged
    stacks: dict[int, str] = field(default_factory=dict)


class Inspector:
    """One rank's part. `warning_ns`, `shutdown_ns`: the limits; 0: never."""

    def __init__(self, rank: int, size: int, warning_ns: int, shutdown_ns: int) -> None:
        self._rank, self._size = rank, size
        self._warning_ns, self._shutdown_ns = warning_ns, shutdown_ns
        self._limit_ns = min(limit for limit in (warning_ns, shutdown_ns, 2**62) if limit)
        self._slack_ns = min(SLACK_NS, self._limit_ns // 4)
        self._known: dict[int, int | None] = {}  # ids that are reported, and since when they were pending
        self._inquiry: _Inquiry | None = None
        self._inquiries = 0
        self._not_before_ns = 0
        self.wake_ns: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it never does anything, because both limits are 0."""
        return not (self._warning_ns or self._shutdown_ns)

    @property
    def old_ns(self) -> int:
        """So old are the tensors that `step` wants to see."""
        return self._limit_ns - self._slack_ns

    @property
    def known(self) -> list[int]:
        """The ids of tensors that `step` wants to see whatever their age."""
        return list(self._known)

    def step(self, now_ns: int, pending: Pending, event: Event | None = None) -> list[Effect]:
        """Return what to do. `pending`: seen after `now_ns` was read."""
        self._forget(pending)
        if event is not None:
            self._hear(event)
        effects = self._go_on(now_ns, pending)
        if self._inquiry is None:
            effects += self._begin(now_ns, pending)
        self.wake_ns = self._next_ns(pending)
        return effects

    def _forget(self, pending: Pending) -> None:
        """Keep of what is reported only what is still pending since then."""
        since = {tensor.id: tensor.since_ns for tensor in pending.tensors}
        self._known = {
            each: since[each]
            for each, was in self._known.items()
            if each in since and was in (None, since[each])
        }

    def _hear(self, event: Event) -> None:
        inquiry = self._inquiry
        if isinstance(event, Asked):
            self._leave_to(event)
        elif inquiry is not None and event.inquiry == inquiry.number:
            if isinstance(event, Answer):
                inquiry.answers[event.rank] = event
            else:
                inquiry.stacks[event.rank] = event.text

    def _leave_to(self, asked: Asked) -> None:
        """Another rank asks: whose report will it be?"""
        own = self._inquiry
        ours = {tensor.id for tensor in own.tensors} if own is not None else set()
        for each in asked.ids:
            if own is None or each not in ours:
                self._known.setdefault(each, None)
            elif asked.rank < self._rank and not own.is_last:
                own.dropped.add(each)
                self._known.setdefault(each, None)

    def _begin(self, now_ns: int, pending: Pending) -> list[Effect]:
        if now_ns < self._not_before_ns:
            return []
        tensors = self._older_than(self._shutdown_ns, now_ns, pending.tensors)
        is_last = bool(tensors)
        if not is_last:
            fresh = [tensor for tensor in pending.tensors if tensor.id not in self._known]
            tensors = fresh if self._older_than(self._warning_ns, now_ns, fresh) else []
        if not tensors:
            return []
        self._inquiries += 1
        tensors = tensors[:MOST_TENSORS]
        self._inquiry = _Inquiry(self._inquiries, tensors, is_last, now_ns + ANSWER_PATIENCE_NS)
        return [Ask(self._inquiries, tuple(tensor.id for tensor in tensors))]

    def _older_than(self, limit_ns: int, now_ns: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if limit_ns and now_ns - tensor.since_ns >= limit_ns]

    def _go_on(self, now_ns: int, pending: Pending) -> list[Effect]:
        inquiry = self._inquiry
        if inquiry is None:
            return []
        effects: list[Effect] = []
        if inquiry.stall is None:
            if len(inquiry.answers) < self._size and now_ns < inquiry.deadline_ns:
                return []
            inquiry.stall = self._judge(inquiry, now_ns, pending)
            if inquiry.stall is not None and not inquiry.is_last:
                inquiry.deadline_ns = now_ns + STACKS_PATIENCE_NS
                effects += [AskForStacks(inquiry.number, rank) for rank in self._questioned(inquiry.stall)]
        if inquiry.stall is None:
            self._inquiry = None
        elif inquiry.is_last:
            self._inquiry = None
            self._shutdown_ns = 0  # once is enough
            effects.append(Abort(inquiry.stall))
        elif not self._questioned(inquiry.stall) - inquiry.stacks.keys() or now_ns >= inquiry.deadline_ns:
            self._inquiry = None
            effects += self._report(inquiry, inquiry.stall, pending)
        return effects

    def _questioned(self, stall: Stall) -> set[int]:
        return set(stall.culprits[:MOST_STACKS]) - {self._rank}

    def _still(self, inquiry: _Inquiry, pending: Pending) -> dict[int, Tensor]:
        """What the inquiry is about and is still pending, as it is now."""
        now = {(tensor.id, tensor.since_ns): tensor for tensor in pending.tensors}
        asked = [
            (tensor.id, tensor.since_ns) for tensor in inquiry.tensors if tensor.id not in inquiry.dropped
        ]
        return {key[0]: now[key] for key in asked if key in now}

    def _judge(self, inquiry: _Inquiry, now_ns: int, pending: Pending) -> Stall | None:
        """Who holds things up? None if nothing does any more, or if that cannot be told now."""
        still = self._still(inquiry, pending)
        answers = inquiry.answers
        own = answers.get(self._rank)
        if not still or own is None:
            return None
        silent = tuple(rank for rank in range(self._size) if rank not in answers)
        progress = {rank: answer.progress for rank, answer in answers.items()}
        least = min(progress.values())
        behind: tuple[int, ...] = ()
        if not silent and least < max(progress.values()):
            behind = tuple(sorted(rank for rank in progress if progress[rank] == least))
        is_blamed = bool(silent or behind)
        if self._rank in behind or (own.is_in_round and not is_blamed):
            self._not_before_ns = now_ns + AGAIN_NS
            return None
        waiting = []
        for index, asked in enumerate(inquiry.tensors):
            if (tensor := still.get(asked.id)) is None:
                continue
            has = {rank: tensor.is_running or answer.has[index] for rank, answer in answers.items()}
            submitted = tuple(sorted(rank for rank in has if has[rank]))
            waiting.append(Waiting(tensor, submitted, tuple(sorted(set(has) - set(submitted)))))
        age_ns = now_ns - min(tensor.since_ns for tensor in still.values())
        return Stall(age_ns, tuple(waiting), behind, silent)

    def _report(self, inquiry: _Inquiry, stall: Stall, pending: Pending) -> list[Effect]:
        still = self._still(inquiry, pending)
        tensors = tuple(waiting for waiting in stall.tensors if waiting.tensor.id in still)
        if not tensors:
            return []
        self._known |= {each: tensor.since_ns for each, tensor in still.items()}
        return [Report(Stall(stall.age_ns, tensors, stall.behind, stall.silent, inquiry.stacks))]

    def _next_ns(self, pending: Pending) -> int | None:
        if self._inquiry is not None:
            return self._inquiry.deadline_ns
        times = [] if pending.next_ns < 0 else [pending.next_ns + self._limit_ns]
        for tensor in pending.tensors:
            if self._warning_ns and tensor.id not in self._known:
                times.append(tensor.since_ns + self._warning_ns)
            if self._shutdown_ns:
                times.append(tensor.since_ns + self._shutdown_ns)
        return max(min(times), self._not_before_ns) if times else None
