"""The machine that tunes, with objectives that are known, and noise that is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ronde.engine.messages import Tune
from ronde.engine.negotiation import Coordinator, Requester
from ronde.engine.tuning import (
    Finished,
    Knob,
    Measured,
    Proposed,
    ProposePoint,
    Sample,
    Space,
    Switch,
    Trial,
    Tuning,
    knobs_for,
)
from ronde.settings import resolve

USUAL = Tune(32 << 20, 5_000_000, 1 << 20, 64 << 10, 0, 16 << 10, 1 << 62)
BAD = replace(USUAL, fusion_bytes=1)

Objective = Callable[[Tune], float]
Search = Callable[[Sequence[tuple[tuple[float, ...], float]]], tuple[float, ...]]


class Job:
    """Does what the tuner says, at a speed that the objective knows, in bytes per second."""

    def __init__(self, tuning: Tuning, objective: Objective, search: Search, values: Tune = BAD) -> None:
        self.tuning, self.objective, self.search, self.values = tuning, objective, search, values
        self.trials: list[Trial] = []
        self.switches: list[Switch] = []
        self.asked: list[ProposePoint] = []
        self.finished: Finished | None = None
        self.samples = tuning.first_samples

    def run(self) -> Finished:
        now_ns = 0
        while self.finished is None:
            samples = [Sample(round(self.objective(self.values)), 10**9) for _ in range(self.samples)]
            now_ns += 10**9 * self.samples
            self.do(now_ns, Measured(tuple(samples)))
        return self.finished

    def do(self, now_ns: int, event: Measured | Proposed) -> None:
        for effect in self.tuning.step(now_ns, event):
            match effect:
                case Trial():
                    self.trials.append(effect)
                case ProposePoint(known):
                    self.asked.append(effect)
                    self.do(now_ns, Proposed(self.search(known)))
                case Switch(values, samples):
                    self.switches.append(effect)
                    self.values, self.samples = values, samples
                case Finished():
                    self.finished = effect


def at_random(seed: int, axes: int) -> Search:
    chooser = random.Random(seed)
    return lambda known: tuple(chooser.random() for _ in range(axes))


def best_at_a_mebibyte(values: Tune) -> float:
    return 1e9 / (1 + abs(math.log2(max(values.fusion_bytes, 1) / (1 << 20))))


def tuning_on_one_host(trials: int = 12, samples: int = 3, warmup: int = 2) -> tuple[Tuning, Space]:
    space = Space(knobs_for(1, 4, "auto"), BAD)
    return Tuning(space, BAD, USUAL, trials, samples, warmup), space


def test_it_begins_where_the_job_began_goes_to_the_defaults_and_ends_with_the_best() -> None:
    tuning, space = tuning_on_one_host()
    job = Job(tuning, best_at_a_mebibyte, at_random(1, 4))
    finished = job.run()
    assert [trial.values for trial in job.trials][:2] == [BAD, USUAL]
    assert len({trial.values for trial in job.trials}) == 12 == finished.trials
    assert [trial.is_again for trial in job.trials] == [False] * 12 + [True] * 20
    assert len({trial.values for trial in job.trials[12:]}) == 4
    assert [trial.values for trial in job.trials[12:16]] * 5 == [trial.values for trial in job.trials[12:]]
    assert [trial.number for trial in job.trials] == list(range(32))
    best = max((trial.values for trial in job.trials), key=best_at_a_mebibyte)
    assert finished.values == best
    assert job.switches[-1] == Switch(best, 0)
    assert [switch.samples for switch in job.switches[:-1]] == [3] * 31
    assert finished.score == round(best_at_a_mebibyte(best))
    assert finished.first == round(best_at_a_mebibyte(BAD))
    assert tuning.is_over
    assert tuning.step(0, Measured((Sample(1, 1),))) == []
    # The search hears of every trial, at the place that it has itself proposed.
    assert len(job.asked) == 10
    assert [point for point, _ in job.asked[-1].known[1:]] == [
        pytest.approx(space.point(switch.values)) for switch in job.switches[:10]
    ]


def test_samples_of_the_warm_up_and_outliers_do_not_count() -> None:
    tuning, _ = tuning_on_one_host(samples=3, warmup=2)
    assert tuning.first_samples == 5
    speeds = [10**9, 10**9, 5, 7, 10**6]
    trial, switch = tuning.step(9, Measured(tuple(Sample(speed, 10**9) for speed in speeds)))
    assert trial == Trial(0, 9, BAD, 7.0, False)
    assert switch == Switch(USUAL, 3)
    assert tuning.best() == Finished(BAD, 7.0, 7.0, 2)  # the second is running


def test_one_lucky_trial_does_not_win() -> None:
    chooser = random.Random(7)
    lucky = Tune(4096, 0, 4096, 4096, 0, 0, 0)
    times = 0

    def noisy(values: Tune) -> float:
        nonlocal times
        if values.fusion_bytes == lucky.fusion_bytes:
            times += 1
            return 3e9 if times <= 3 else 1e8
        return best_at_a_mebibyte(values) * chooser.uniform(0.9, 1.1)

    tuning, space = tuning_on_one_host(samples=3, warmup=0)
    points = iter([space.point(lucky)])
    otherwise = at_random(3, 4)
    finished = Job(tuning, noisy, lambda known: next(points, None) or otherwise(known)).run()
    assert times == 3 + 15
    assert finished.values.fusion_bytes != lucky.fusion_bytes


def test_what_was_measured_once_does_not_win_over_finalists_that_turn_out_slower() -> None:
    seen: list[Tune] = []

    def slower_later(values: Tune) -> float:
        if values in seen:
            return 5e8
        seen.append(values)
        return 1e9 + 1e6 * len(seen)

    tuning, _ = tuning_on_one_host(trials=8, samples=1, warmup=0)
    finished = Job(tuning, slower_later, at_random(4, 4)).run()
    assert finished.values in seen[-4:]
    assert finished.score == 5e8


def test_the_start_wins_if_nothing_is_better() -> None:
    tuning, _ = tuning_on_one_host(trials=5)
    finished = Job(tuning, lambda values: 2e9 if values == BAD else 1e9, at_random(2, 4)).run()
    assert finished.values == BAD
    assert finished.score == finished.first == 2e9


def test_stopped_between_trials_it_knows_the_best_so_far() -> None:
    tuning, _ = tuning_on_one_host(warmup=0)
    assert tuning.best().score == 0
    tuning.step(0, Measured((Sample(5, 10**9),)))
    tuning.step(0, Measured((Sample(9, 10**9),)))
    assert tuning.best() == Finished(USUAL, 9.0, 5.0, 2)


def test_a_job_that_begins_with_the_defaults_tries_them_once() -> None:
    space = Space(knobs_for(1, 2, "auto"), USUAL)
    job = Job(Tuning(space, USUAL, USUAL, 4, 1, 0), lambda values: 1e9, at_random(2, 4), USUAL)
    job.run()
    assert [trial.values for trial in job.trials[:4]].count(USUAL) == 1


@pytest.mark.parametrize("knob", [knob for hosts in (1, 3) for knob in knobs_for(hosts, 6, "auto")])
def test_knobs_keep_to_their_ranges(knob: Knob) -> None:
    lowest = 0 if knob.reaches_zero else knob.lowest
    assert [knob.value(at) for at in (-1.0, 0.0, 1.0, 2.0)] == [lowest, lowest, knob.highest, knob.highest]
    assert (knob.place(0), knob.place(2**62)) == (0, 1)
    for _ in range(100):
        value = knob.value(random.Random(5).random())
        assert knob.value(knob.place(value)) == value


@pytest.mark.parametrize(
    ("hosts", "ranks", "algorithm", "more"),
    [
        (1, 4, "auto", {"batch_bytes", "linger_ns"}),
        (2, 2, "auto", {"doubling_bytes"}),
        (3, 3, "auto", {"doubling_bytes", "ring_bytes"}),
        (3, 6, "auto", {"doubling_bytes", "ring_bytes", "hierarchical_bytes"}),
        (3, 6, "hierarchical", {"doubling_bytes", "ring_bytes"}),
        (3, 3, "direct", set()),
    ],
)
def test_what_is_tuned_where(hosts: int, ranks: int, algorithm: str, more: set[str]) -> None:
    knobs = {knob.name for knob in knobs_for(hosts, ranks, algorithm)}
    assert knobs == {"fusion_bytes", "largest_fused_bytes"} | more


def test_what_the_user_has_set_is_not_tuned() -> None:
    fixed = resolve({"RONDE_FUSION_BYTES": "32MiB", "HOROVOD_CYCLE_TIME": "1"}, batch_bytes=4096).given
    assert {knob.name for knob in knobs_for(1, 4, "auto", fixed)} == {"largest_fused_bytes"}
    assert knobs_for(1, 4, "auto", resolve({}).given) == knobs_for(1, 4, "auto")


def test_what_is_automatic_is_not_described() -> None:
    space = Space(knobs_for(3, 3, "auto"), USUAL)
    assert set(space.describe(USUAL)) == {"fusion_bytes", "largest_fused_bytes", "doubling_bytes"}
    assert space.values((0, 0, 0, 0.5)).linger_ns == USUAL.linger_ns


def test_every_rank_is_told_at_the_beginning_of_the_next_step() -> None:
    coordinator = Coordinator(2, 8)
    coordinator.tune(BAD)
    assert coordinator.step([[], []]) == [BAD]
    assert coordinator.step([[], []]) == []
    assert Requester(1, 2).apply_item(BAD) == [BAD]
