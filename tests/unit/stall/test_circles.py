"""Ranks that wait for each other: the graph alone, and inspectors that find out by asking each other."""

from __future__ import annotations

import itertools
import random

from ronde.stall.circles import circle_through, entangled_with
from ronde.stall.events import (
    Answer,
    AskAbout,
    AskForStacks,
    AskRanks,
    Blocked,
    Effect,
    Pending,
    Report,
    Stacks,
    Stall,
    Tensor,
)
from ronde.stall.inspector import Inspector
from ronde.stall.reports import describe

S = 10**9
WARNING_S = 10
SEEDS = range(200)


def random_waits(random: random.Random) -> dict[int, set[int]]:
    """Whom each sleeping rank waits for; the other ranks do not sleep."""
    size = random.randint(2, 8)
    density = random.choice((0.1, 0.2, 0.4))
    waits = {}
    for rank in range(size):
        others = {other for other in range(size) if other != rank and random.random() < density}
        if others:
            waits[rank] = others
    return waits


def reaches(waits: dict[int, set[int]]) -> set[tuple[int, int]]:
    """All pairs of which the first waits for the second, perhaps by way of others: repeated until nothing is added."""
    pairs = {(rank, other) for rank, others in waits.items() for other in others}
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not more:
            return pairs
        pairs |= more


def test_a_circle_is_found_where_there_is_one_and_nowhere_else() -> None:
    for rank, seed in itertools.product(range(8), SEEDS):
        waits = random_waits(random.Random(seed))
        pairs = reaches(waits)
        circle = circle_through(rank, waits)
        assert bool(circle) == ((rank, rank) in pairs)
        assert entangled_with(rank, waits) == {b for a, b in pairs if a == rank and (b, a) in pairs}
        assert circle[:1] in ((), (rank,))
        assert len(set(circle)) == len(circle)
        assert all(after in waits[before] for before, after in zip(circle, (*circle[1:], rank)))


class Ranks:
    """Ranks in one world, each an inspector; a sleeping rank awaits a tensor whose id is its rank."""

    def __init__(self, waits: dict[int, set[int]], random: random.Random) -> None:
        self.waits, self.random = waits, random
        self.size = 1 + max([*waits, *(other for others in waits.values() for other in others)], default=0)
        self.inspectors = [Inspector(rank, self.size, WARNING_S * S, 0) for rank in range(self.size)]
        self.since = {rank: random.randrange(S // 2) for rank in waits}
        self.reports: list[tuple[int, int, Stall]] = []  # when, by which rank, what
        self.now_ns = 0

    def run_until(self, seconds: float) -> None:
        """Wake the inspectors as they want, or in a random order at the same time."""
        while self.now_ns < seconds * S:
            self.now_ns += S // 4
            for rank in self.random.sample(range(self.size), self.size):
                self.step(rank)

    def step(self, rank: int, event: Answer | Stacks | None = None) -> None:
        inspector = self.inspectors[rank]
        pending = Pending()
        if rank in self.waits:
            pending = Pending([Tensor(rank, f"of {rank}", "allreduce", self.since[rank], is_awaited=True)])
        for effect in inspector.step(self.now_ns, pending, event):
            self.perform(rank, effect)

    def perform(self, rank: int, effect: Effect) -> None:
        match effect:
            case AskRanks(inquiry, ids):
                self.answer(rank, inquiry, ids)
            case AskAbout(inquiry, blocked):
                self.answer(rank, inquiry, tuple(each.id for each in blocked))
            case AskForStacks(inquiry, other):
                self.step(rank, Stacks(other, inquiry, "here"))
            case Report(stall):
                self.reports.append((self.now_ns, rank, stall))

    def answer(self, asking: int, inquiry: int, ids: tuple[int, ...]) -> None:
        for rank in self.random.sample(range(self.size), self.size):
            has = tuple(rank not in self.waits.get(each, ()) for each in ids)
            blocked = Blocked(1, rank, self.since[rank]) if rank in self.waits else None
            self.step(asking, Answer(rank, inquiry, 7, False, has, f"waits for 'of {rank}'", blocked))


def test_every_circle_is_reported_once_at_once_by_the_lowest_rank_on_it() -> None:
    for seed in SEEDS:
        choices = random.Random(seed)
        waits = random_waits(choices)
        ranks = Ranks(waits, choices)
        ranks.run_until(WARNING_S - 1)
        expected = {min(tied) for rank in waits if (tied := entangled_with(rank, waits))}
        assert sorted(rank for _, rank, _ in ranks.reports) == sorted(expected), seed
        for at_ns, rank, stall in ranks.reports:
            assert at_ns <= 2 * S
            assert stall.circle == circle_through(rank, waits)
            assert set(stall.circle) <= stall.stacks.keys() | {rank}


def test_a_circle_that_opens_between_the_questions_is_none() -> None:
    waits = {0: {1}, 1: {2}, 2: {0}}
    ranks = Ranks(waits, random.Random(0))
    asked = []
    answer = ranks.answer

    def answer_after_rank_2_has_gone_on(asking: int, inquiry: int, ids: tuple[int, ...]) -> None:
        if asking == 0:
            asked.append(inquiry)
        if len(asked) == 2:
            ranks.since[2] = ranks.now_ns  # it sleeps again, in the next step's tensor of that name
        answer(asking, inquiry, ids)

    ranks.answer = answer_after_rank_2_has_gone_on  # type: ignore[method-assign]
    ranks.now_ns = 2 * S
    ranks.step(0)
    assert len(asked) == 2
    assert ranks.reports == []


def test_a_report_says_who_waits_for_whom() -> None:
    ranks = Ranks({0: {1}, 1: {2}, 2: {0}}, random.Random(0))
    ranks.run_until(2)
    [(_, rank, stall)] = ranks.reports
    assert rank == 0
    text = describe(stall, dict.fromkeys(range(3), "alpha"), {})
    assert (
        "\nranks wait in a circle, rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0: a deadlock, unless another"
        in text
    )
    assert "rank 1 on alpha waits for 'of 1'\nrank 1 on alpha is here" in text
    assert "rank 2 on alpha waits for 'of 2'\nrank 2 on alpha is here" in text
    assert "waits for this rank, too" in describe(
        Stall(S, stall.tensors, circle=(0, 1)), dict.fromkeys(range(3), "alpha"), {}
    )
