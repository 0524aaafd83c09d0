"""Runs the simulator, and makes sure that it would notice if the machines were wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from tests.sim.common_order import Broken
from tests.sim.leaders import Leader
from tests.sim.negotiation import main, simulate
from tests.sim.workload import draw_ranks

from ronde.engine import merging
from ronde.engine.merging import Contribution
from ronde.engine.messages import AllJoined, Evict, Joined, Message, Request, StreamItem
from ronde.engine.negotiation import Coordinator, Requester
from ronde.types import DType, Kind

BATCH = 100
WHAT_HAPPENS = {
    "all joined",
    "negotiation rounds",
    "deaths",
    "displaced",
    "evictions",
    "executed",
    "executed without all",
    "groups executed",
    "hits executed",
    "left too early",
    "mismatches",
    "submissions lost",
    "tuned",
    "warnings",
}


@pytest.mark.parametrize(
    "first", [pytest.param(i * BATCH, marks=[pytest.mark.slow] if i else []) for i in range(6)]
)
def test_some_hundred_seeds_with_up_to_64_ranks(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        counts += simulate(seed, draw_ranks(seed))
    assert set(counts) == WHAT_HAPPENS, "the simulations have become dull"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_1024_ranks(seed: int) -> None:
    simulate(seed, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 10])
def test_10000_ranks(seed: int) -> None:
    simulate(seed, 10_000)


def test_a_seed_tells_the_same_story_again(capsys: pytest.CaptureFixture[str]) -> None:
    stories = []
    for _ in range(2):
        assert main(["--seed", "7", "--ranks", "5"]) == 0
        stories.append(capsys.readouterr().out)
    assert stories[0] == stories[1]
    assert stories[0].startswith("1 simulations:")


# Machines that are wrong in one way.


def evict_without_saying_so(patch: pytest.MonkeyPatch) -> None:
    step = Coordinator.step_merged

    def broken(self: Coordinator, *arguments: object) -> list[StreamItem]:
        return [item for item in step(self, *arguments) if not isinstance(item, Evict)]  # type: ignore[arg-type]

    patch.setattr(Coordinator, "step_merged", broken)


def evict_after_everything_else(patch: pytest.MonkeyPatch) -> None:
    step = Coordinator.step_merged

    def broken(self: Coordinator, *arguments: object) -> list[StreamItem]:
        return sorted(step(self, *arguments), key=lambda item: isinstance(item, Evict))  # type: ignore[arg-type]

    patch.setattr(Coordinator, "step_merged", broken)


class WithoutOrder(list[StreamItem]):
    """Every second reader finds the items in another order."""

    is_reversed = True

    def __iter__(self) -> Iterator[StreamItem]:
        self.is_reversed = not self.is_reversed
        return super().__reversed__() if self.is_reversed else super().__iter__()


def send_items_without_order(patch: pytest.MonkeyPatch) -> None:
    step = Coordinator.step_merged
    patch.setattr(Coordinator, "step_merged", lambda *arguments: WithoutOrder(step(*arguments)))


def forget_displaced_hits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requester, "request_again", lambda self, request: None)


def hit_whatever_the_signature(patch: pytest.MonkeyPatch) -> None:
    submit = Requester.submit

    def broken(self: Requester, request: Request, site: str = "") -> int | None:
        cached = self.cached_response(request.name)
        return cached[2] if cached else submit(self, request, site)

    patch.setattr(Requester, "submit", broken)


def use_the_arrival_order_as_that_of_ranks(patch: pytest.MonkeyPatch) -> None:
    requests_of = merging.requests_of

    def broken(told: Sequence[Contribution]) -> dict[int, Request]:
        by_rank = requests_of(told)
        return dict(zip(by_rank, reversed(by_rank.values())))

    patch.setattr("ronde.engine.negotiation.requests_of", broken)


def go_on_before_what_is_in_flight_has_run(patch: pytest.MonkeyPatch) -> None:
    step = Coordinator.step_merged

    def broken(self: Coordinator, *arguments: object) -> list[StreamItem]:
        items = step(self, *arguments)  # type: ignore[arg-type]
        if not any(isinstance(item, AllJoined) for item in items):
            return items
        return sorted(items, key=lambda item: not isinstance(item, (Joined, AllJoined)))

    patch.setattr(Coordinator, "step_merged", broken)


def cache_the_rows_of_ranks_that_have_joined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_may_be_cached", lambda self, request: request.kind != Kind.barrier)


def merge_what_differs(patch: pytest.MonkeyPatch) -> None:
    part = merging._common_part

    def broken(message: Message) -> Message:
        merged = part(message)
        return replace(merged, dtype=DType.int8) if isinstance(merged, Request) else merged

    patch.setattr(merging, "_common_part", broken)


def believe_reports_from_before_a_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "believes", lambda self, note: True)


def report_what_only_the_own_host_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Leader, "children", property(lambda self: range(0), lambda self, value: None), raising=False
    )


@pytest.mark.parametrize(
    "break_it",
    [
        cache_the_rows_of_ranks_that_have_joined,
        go_on_before_what_is_in_flight_has_run,
        evict_without_saying_so,
        evict_after_everything_else,
        send_items_without_order,
        forget_displaced_hits,
        hit_whatever_the_signature,
        use_the_arrival_order_as_that_of_ranks,
        believe_reports_from_before_a_round,
        report_what_only_the_own_host_has,
        merge_what_differs,
    ],
)
def test_what_is_wrong_is_noticed_and_can_be_replayed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(monkeypatch)
    assert main(["--seeds", "100"]) == 1
    story = capsys.readouterr().out
    replay = re.search(
        r"^replay: python -m tests.sim.negotiation --seed (\d+) --ranks (\d+)$", story, re.MULTILINE
    )
    assert replay
    with pytest.raises(Broken) as caught:
        simulate(int(replay[1]), int(replay[2]))
    assert str(caught.value) == story.rstrip("\n")
