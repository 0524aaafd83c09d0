"""The inspector of stalls alone: when it asks, whom, what it reports, once, and when it gives up.

Ranks that wait for each other: the graph alone, and inspectors that find out by asking each other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from ronde.stall.inspector import (
    JOIN,
    Abort,
    Answer,
    AskAboutTensors,
    AskAboutWaits,
    Asked,
    AskForStacks,
    Blocked,
    Effect,
    Event,
    Inspector,
    Pending,
    Report,
    Stacks,
    Stall,
    StalledTensor,
    Tensor,
    circle_through,
    entangled_with,
)
from ronde.stall.reports import abort_reason, describe_stall, readable_stacks

S = 10**9
HOSTS = {0: "alpha", 1: "alpha", 2: "beta", 3: "beta"}
OUTLOOK = (
    "the next report follows after 360 s; to end such jobs, set RONDE_STALL_SHUTDOWN to a number of seconds"
)


class Rank:
    """An inspector, with what is pending around it."""

    def __init__(self, rank: int = 0, size: int = 3, warning_s: int = 60, shutdown_s: int = 0) -> None:
        self.inspector = Inspector(rank, size, warning_s * S, shutdown_s * S)
        self.tensors: list[Tensor] = []
        self.now_ns = 0

    def submit(self, name: str, is_running: bool = False, is_awaited: bool = False) -> Tensor:
        self.tensors.append(Tensor(hash(name), name, "allreduce", self.now_ns, is_running, is_awaited))
        return self.tensors[-1]

    def at(self, seconds: float, event: Event | None = None) -> list[Effect]:
        self.now_ns = round(seconds * S)
        known = set(self.inspector.known)
        before_ns = self.now_ns - self.inspector.old_ns
        seen = [each for each in self.tensors if each.since_ns <= before_ns or each.id in known]
        others = [each.since_ns for each in self.tensors if each not in seen]
        return self.inspector.step(self.now_ns, Pending(seen, min(others, default=-1)), event)

    def answers(
        self,
        seconds: float,
        ask: Effect,
        has: Mapping[int, Sequence[bool]],
        calls: dict[int, int] | None = None,
        in_round: bool = False,
    ) -> list[Effect]:
        """Every rank that has something to say says it."""
        assert isinstance(ask, AskAboutTensors)
        effects = []
        for rank, each in has.items():
            answer = Answer(rank, ask.inquiry, (calls or {}).get(rank, 7), in_round, tuple(each))
            effects += self.at(seconds, answer)
        return effects

    def wakes_at(self) -> float | None:
        return None if self.inspector.wake_ns is None else self.inspector.wake_ns / S


def reported(effects: list[Effect]) -> Stall:
    (report,) = effects
    assert isinstance(report, Report)
    return report.stall


def test_a_stall_is_asked_about_and_reported_once_to_the_second() -> None:
    rank = Rank()
    rank.submit("x")
    assert rank.at(0) == []
    assert rank.at(59.999) == []
    assert rank.wakes_at() == 60
    (ask,) = rank.at(60)
    assert rank.answers(60.1, ask, {0: [True], 2: [True]}) == []
    (question,) = rank.answers(60.1, ask, {1: [False]})
    assert question == AskForStacks(ask.inquiry, 1)  # type: ignore[union-attr]
    stall = reported(rank.at(60.2, Stacks(1, 1, "here")))
    assert [(each.tensor.name, each.submitted, each.missing) for each in stall.tensors] == [
        ("x", (0, 2), (1,))
    ]
    assert stall.stacks == {1: "here"}
    assert stall.next_ns == 360 * S
    assert rank.at(61) == []
    assert rank.at(359) == []


def test_what_stalls_together_is_one_report_and_what_follows_another() -> None:
    rank = Rank(size=2)
    rank.submit("a")
    rank.now_ns = S // 2
    rank.submit("b")
    rank.now_ns = 30 * S
    rank.submit("c")
    (ask,) = rank.at(60)
    rank.answers(60, ask, {0: [True, True], 1: [False, False]})
    assert [each.tensor.name for each in reported(rank.at(60, Stacks(1, 1, ""))).tensors] == ["a", "b"]
    assert rank.wakes_at() == 90
    (ask,) = rank.at(90)
    rank.answers(90, ask, {0: [True], 1: [False]})
    assert [each.tensor.name for each in reported(rank.at(90, Stacks(1, 2, ""))).tensors] == ["c"]


def test_a_tensor_that_stalls_again_is_reported_again() -> None:
    rank = Rank(size=2)
    for start in (0, 100):
        rank.tensors.clear()
        rank.at(start)
        rank.submit("x")
        (ask,) = rank.at(start + 60)
        rank.answers(start + 60, ask, {0: [True], 1: [False]})
        reported(rank.at(start + 60, Stacks(1, ask.inquiry, "")))  # type: ignore[union-attr]


def test_what_is_over_in_the_meantime_is_not_reported() -> None:
    rank = Rank(size=2)
    rank.submit("x")
    (ask,) = rank.at(60)
    rank.answers(60, ask, {0: [True], 1: [False]})
    rank.tensors.clear()
    assert rank.at(60.1, Stacks(1, 1, "here")) == []
    assert rank.wakes_at() is None


def test_what_goes_on_stalling_is_reported_at_growing_distances() -> None:
    rank = Rank(size=2, warning_s=10)
    rank.submit("x")
    for number, at_s in enumerate((10, 60, 360, 2160), start=1):
        assert rank.at(at_s - 0.5) == []
        (ask,) = rank.at(at_s)
        rank.answers(at_s, ask, {0: [True], 1: [False]})
        assert reported(rank.at(at_s, Stacks(1, number, "here"))).next_ns == 6 * at_s * S


def join(rank: Rank, has: Sequence[bool], blocked: Blocked | None) -> list[Effect]:
    """A rank of three has waited 10 s in join(); return what follows from the others' answers."""
    (ask,) = rank.at(10)
    assert isinstance(ask, AskAboutTensors)
    rank.at(10, Answer(0, ask.inquiry, 7, False, (True,), "waits in join()", Blocked(1, 5, 0)))
    rank.at(10, Answer(1, ask.inquiry, 7, False, (has[0],)))
    return rank.at(10, Answer(2, ask.inquiry, 7, False, (has[1],), blocked=blocked))


def test_a_join_that_nobody_follows_is_reported() -> None:
    rank = Rank(warning_s=10)
    rank.tensors.append(Tensor(1, "join()", JOIN, 0))
    assert join(rank, [True, False], None) == [AskForStacks(1, 2)]
    stall = reported(rank.at(10, Stacks(2, 1, "main thread:\n  here")))
    assert describe_stall(stall, HOSTS, {}).splitlines()[:4] == [
        "stalled: the engine has run nothing for 10 s, and join() waits for the other ranks to join",
        "  join()",
        "    called by ranks 0-1, not by rank 2",
        "rank 2 on beta is here (most recent call first):",
    ]
    assert abort_reason(stall, HOSTS, 10 * S).endswith(": join(): waited for rank 2 on beta")


def test_a_join_leaves_the_report_to_a_rank_that_has_not_joined_and_waits() -> None:
    rank = Rank(warning_s=10)
    rank.tensors.append(Tensor(1, "join()", JOIN, 0))
    assert join(rank, [False, False], Blocked(1, 6, 0)) == []
    assert rank.wakes_at() == 60


def test_a_join_begins_anew_with_everything_that_runs() -> None:
    rank = Rank(warning_s=10)
    for second in range(0, 60, 5):
        rank.tensors[:] = [Tensor(1, "join()", JOIN, second * S)]
        assert rank.at(second) == []


def test_one_of_the_ranks_that_notice_reports() -> None:
    # Asked before it has noticed: it leaves the report to the other, also if its own tensor is much younger.
    second = Rank(rank=2)
    second.now_ns = 40 * S
    x = second.submit("x")
    assert second.at(60, Asked(1, (x.id,))) == []
    assert second.at(200) == []
    # Both have asked: the lower one goes on.
    for own, other, asks_on in ((0, 2, True), (2, 0, False)):
        rank = Rank(rank=own)
        x, _ = rank.submit("x"), rank.submit("only here")
        (ask,) = rank.at(60)
        rank.at(60, Asked(other, (x.id,)))
        effects = rank.answers(60.1, ask, {0: [True, True], 1: [False, False], 2: [True, True]})
        assert effects == [AskForStacks(1, 1)]
        names = [each.tensor.name for each in reported(rank.at(60.2, Stacks(1, 1, ""))).tensors]
        assert names == (["x", "only here"] if asks_on else ["only here"])


def test_a_rank_that_does_not_answer_is_named_after_the_patience() -> None:
    rank = Rank()
    rank.submit("x")
    (ask,) = rank.at(60)
    rank.answers(60, ask, {0: [True], 2: [True]}, {2: 6})  # rank 2 may be waiting for rank 1
    assert rank.wakes_at() == 62
    stall = reported(rank.at(62))
    assert (stall.silent, stall.behind, stall.culprits) == ((1,), (), ())
    assert describe_stall(stall, HOSTS, {1: "it is stopped"}).splitlines()[2:] == [
        "    submitted by ranks 0, 2",
        "rank 1 on alpha does not answer: it is stopped",
        OUTLOOK,
    ]


def test_a_rank_that_does_not_tell_its_stacks_holds_nothing_up() -> None:
    rank = Rank(size=2)
    rank.submit("x")
    (ask,) = rank.at(60)
    rank.answers(60, ask, {0: [True], 1: [False]})
    assert rank.wakes_at() == 62
    assert "does not send its stacks" in describe_stall(reported(rank.at(62)), HOSTS, {})


def test_a_rank_that_does_not_come_to_a_round_is_the_one() -> None:
    rank = Rank()
    rank.submit("x")
    (ask,) = rank.at(60)
    effects = rank.answers(60, ask, {0: [True], 1: [True], 2: [True]}, {0: 8, 1: 7, 2: 9}, in_round=True)
    assert effects == [AskForStacks(1, 1)]
    stall = reported(rank.at(60, Stacks(1, 1, "main thread:\n  here")))
    assert stall.behind == (1,)
    assert "rank 1 on alpha holds up the engine" in describe_stall(stall, HOSTS, {})


def test_a_rank_that_does_not_come_out_of_a_round_is_the_one() -> None:
    rank = Rank(size=2)
    rank.submit("x")
    (ask,) = rank.at(60)
    assert isinstance(ask, AskAboutTensors)
    assert rank.at(60, Answer(1, 1, 7, True, (True,))) == []
    assert rank.at(60, Answer(0, 1, 7, False, (True,))) == [AskForStacks(1, 1)]
    assert reported(rank.at(60, Stacks(1, 1, "here"))).behind == (1,)


def test_who_is_behind_or_in_a_round_itself_looks_again() -> None:
    for calls, in_round in (({0: 6, 1: 7}, False), ({0: 7, 1: 7}, True)):
        rank = Rank(size=2)
        rank.submit("x")
        (ask,) = rank.at(60)
        assert rank.answers(60, ask, {0: [True], 1: [False]}, calls, in_round) == []
        assert rank.wakes_at() == 61
        assert rank.at(60.5) == []
        (again,) = rank.at(61)
        assert rank.answers(61, again, {0: [True], 1: [False]}) == [AskForStacks(2, 1)]


def test_a_rank_that_looks_again_leaves_the_report_to_a_lower_rank_only() -> None:
    for other, asks_on in ((2, True), (0, False)):
        rank = Rank(rank=1)
        x = rank.submit("x")
        (ask,) = rank.at(60)
        missing: dict[int, Sequence[bool]] = {0: [True], 1: [True], 2: [False]}
        assert rank.answers(60, ask, missing, {0: 7, 1: 6, 2: 7}) == []
        assert rank.at(60.5, Asked(other, (x.id,))) == []
        assert bool(rank.at(61)) == asks_on


def test_an_abort_names_three_ranks_and_counts_the_others() -> None:
    tensor = StalledTensor(Tensor(1, "x", "allreduce", 0), (0,), (1, 2, 3))
    hosts = {rank: f"host-{rank}" for rank in range(6)}
    three = "waited for rank 1 on host-1, rank 2 on host-2, rank 3 on host-3"
    assert abort_reason(Stall(S, (tensor,)), hosts, S).endswith(three)
    assert abort_reason(Stall(S, (tensor,), silent=(5,)), hosts, S).endswith(f"{three} and 1 more")


def test_a_long_name_has_60_characters_in_a_report() -> None:
    for length, shown in ((60, "x" * 60), (61, "x" * 57 + "...")):
        tensor = StalledTensor(Tensor(1, "x" * length, "allreduce", 0), (0,), (1,))
        assert f": tensor '{shown}' (allreduce): " in abort_reason(Stall(S, (tensor,)), {1: "b"}, S)


def test_what_is_being_executed_is_nobodys_fault_and_may_just_take_long() -> None:
    rank = Rank(size=2)
    rank.submit("x", is_running=True)
    (ask,) = rank.at(60)
    assert rank.answers(60, ask, {0: [True], 1: [False]}) == []
    assert rank.wakes_at() == 360
    (ask,) = rank.at(360)
    stall = reported(rank.answers(360, ask, {0: [True], 1: [False]}))
    assert stall.culprits == ()
    assert "submitted by all ranks: it is being executed" in describe_stall(stall, HOSTS, {})


def test_the_second_limit_aborts_also_what_another_rank_has_reported() -> None:
    rank = Rank(rank=1, size=2, shutdown_s=100)
    x = rank.submit("x")
    assert rank.at(10, Asked(0, (x.id,))) == []
    assert rank.at(60) == []
    assert rank.wakes_at() == 100
    (ask,) = rank.at(100)
    assert rank.at(100, Asked(0, (x.id,))) == []
    (abort,) = rank.answers(100, ask, {0: [False], 1: [True]})
    assert isinstance(abort, Abort)
    expected = (
        "stalled for 100 s (stall_shutdown is 100 s): tensor 'x' (allreduce): waited for rank 0 on alpha"
    )
    assert abort_reason(abort.stall, HOSTS, 100 * S) == expected
    assert rank.at(200) == []


def test_tensors_stall_together_within_a_quarter_of_a_short_limit() -> None:
    assert Inspector(0, 2, 0, S).old_ns == S * 3 // 4
    assert Inspector(0, 2, 0, 60 * S).old_ns == 59 * S


def test_limits_that_are_off() -> None:
    assert Inspector(0, 2, 0, 0).is_idle
    rank = Rank(size=2, warning_s=0, shutdown_s=10)
    rank.submit("x")
    rank.at(0)
    assert rank.wakes_at() == 10


def test_a_report_reads_well() -> None:
    rank = Rank(size=4)
    for name in ("layer1.weight", "layer1.bias"):
        rank.submit(name)
    (ask,) = rank.at(60)
    yes, no = [True, True], [False, False]
    rank.answers(60, ask, {0: yes, 1: no, 2: yes, 3: yes})
    text = describe_stall(reported(rank.at(60.3, Stacks(1, 1, "main thread:\n  File"))), HOSTS, {})
    assert text.splitlines() == [
        "stalled: 2 tensors have been waiting for 60 s",
        "  'layer1.weight' (allreduce), 'layer1.bias' (allreduce)",
        "    submitted by ranks 0, 2-3, not by rank 1",
        "rank 1 on alpha is here (most recent call first):",
        "  main thread:",
        "    File",
        OUTLOOK,
    ]


def test_a_dump_shows_the_main_thread_first_and_none_of_ours() -> None:
    raw = (
        "0x10 0x20\n"
        'Thread 0x0000000000000020 (most recent call first):\n  File "ours.py", line 1 in run\n\n'
        'Thread 0x0000000000000030 [loader] (most recent call first):\n  File "data.py", line 2 in load\n\n'
        'Thread 0x0000000000000010 (most recent call first):\n  File "train.py", line 3 in step\n'
    )
    assert readable_stacks(raw).splitlines() == [
        "main thread:",
        '  File "train.py", line 3 in step',
        "thread loader:",
        '  File "data.py", line 2 in load',
    ]


def test_of_many_missing_ranks_some_are_asked() -> None:
    rank = Rank(size=100)
    rank.submit("x")
    (ask,) = rank.at(60)
    effects = rank.answers(60, ask, {each: [each == 0] for each in range(100)})
    assert [each.rank for each in effects if isinstance(each, AskForStacks)] == list(range(1, 9))
    text = describe_stall(reported(rank.at(62)), dict.fromkeys(range(100), "alpha"), {})
    assert "submitted by rank 0, not by ranks 1-99" in text
    assert text.splitlines()[-2] == "and 91 more"


def test_ranks_of_a_process_set_are_called_as_in_the_world() -> None:
    rank = Rank(size=2)
    rank.submit("x")
    (ask,) = rank.at(60)
    rank.answers(60, ask, {0: [True], 1: [False]})
    stall = reported(rank.at(60, Stacks(1, 1, "here"))).renamed([3, 5])
    text = describe_stall(stall, {3: "alpha", 5: "beta"}, {})
    assert "submitted by rank 3, not by rank 5" in text
    assert "rank 5 on beta is here" in text


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
            case AskAboutTensors(inquiry, ids):
                self.answer(rank, inquiry, ids)
            case AskAboutWaits(inquiry, blocked):
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
    text = describe_stall(stall, dict.fromkeys(range(3), "alpha"), {})
    assert (
        "\nranks wait in a circle, rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0: a deadlock, unless another"
        in text
    )
    assert "rank 1 on alpha waits for 'of 1'\nrank 1 on alpha is here" in text
    assert "rank 2 on alpha waits for 'of 2'\nrank 2 on alpha is here" in text
    assert "waits for this rank, too" in describe_stall(
        Stall(S, stall.tensors, circle=(0, 1)), dict.fromkeys(range(3), "alpha"), {}
    )
