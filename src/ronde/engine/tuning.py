"""Finds the best values of the engine's settings while a job runs. Pure.

Rules

1. The machine tries one set of values after another. All ranks adopt it at the same place of the log. Then the engine
   measures a number of samples, and their median is the score of the trial, in bytes per second.
2. The first trial has the values that the job began with, the second the defaults. From then on a search proposes
   points of the unit cube, one axis per knob, from all scores so far. The shell provides the search, from any library.
3. A high score may be luck. So after the last trial the best few are measured again, in turns, because the machine may
   have slow periods. Only these measurements decide between them.
4. Then all ranks adopt the best values, and the measurements end.

A knob is tuned if the user has not set it, and if it has an effect on this topology: linger_ns has none between hosts,
and one host has a single algorithm of reduction. The axis of a knob is logarithmic: 1 MiB is to 2 MiB as 1 KiB to 2
KiB.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ronde.engine.messages import Tune

__all__ = [
    "LARGEST_FUSION_BYTES",
    "ProposePoint",
    "Effect",
    "Event",
    "Finished",
    "Knob",
    "Measured",
    "Proposed",
    "Sample",
    "Space",
    "Switch",
    "Trial",
    "Tuning",
    "knobs_for",
]

Point = tuple[float, ...]
FINALISTS, TURNS = 4, 5


@dataclass(frozen=True, slots=True)
class Knob:
    """One field of `Tune` that is tuned, from `lowest` to `highest`; the lowest stands for 0 if `reaches_zero`."""

    name: str
    lowest: int
    highest: int
    reaches_zero: bool = False

    def value(self, at: float) -> int:
        """Return the value at a position of the axis, which goes from 0 to 1; a position beyond counts as its end."""
        at = min(max(at, 0.0), 1.0)
        value = round(self.lowest * (self.highest / self.lowest) ** at)
        return 0 if self.reaches_zero and value == self.lowest else value

    def place(self, value: int) -> float:
        """Return the position of a value on the axis; a value beyond counts as its end."""
        value = min(max(value, self.lowest), self.highest)
        return math.log(value / self.lowest) / math.log(self.highest / self.lowest)


_KIB, _MIB = 2**10, 2**20
LARGEST_FUSION_BYTES = 64 * _MIB
_LARGEST_SETTING = 2**31  # larger values mean an automatic choice


def knobs_for(hosts: int, ranks: int, algorithm: str, fixed: Collection[str] = ()) -> list[Knob]:
    """Return the knobs that have an effect. `algorithm`: the setting `allreduce_algorithm`.

    `fixed`: the names of settings that the user has set, which are not tuned.
    """
    knobs = [
        Knob("fusion_bytes", _KIB, LARGEST_FUSION_BYTES),
        Knob("largest_fused_bytes", _KIB, LARGEST_FUSION_BYTES),
    ]
    if hosts == 1:
        knobs.append(Knob("batch_bytes", 4 * _KIB, LARGEST_FUSION_BYTES))
        knobs.append(Knob("linger_ns", 10_000, 20_000_000, reaches_zero=True))
    elif algorithm in ("auto", "hierarchical"):
        if hosts < ranks and algorithm == "auto":
            knobs.append(Knob("hierarchical_bytes", 64, 16 * _MIB, reaches_zero=True))
        knobs.append(Knob("doubling_bytes", 256, 4 * _MIB, reaches_zero=True))
        if hosts > 2:
            knobs.append(Knob("ring_bytes", 4 * _KIB, 256 * _MIB))
    return [knob for knob in knobs if knob.name not in fixed]


class Space:
    """The values that can be tried: those of the knobs vary, the other fields of `Tune` do not."""

    def __init__(self, knobs: Sequence[Knob], start: Tune) -> None:
        self.knobs = tuple(knobs)
        self._start = start

    def values(self, point: Point) -> Tune:
        """Return the values at a point of the unit cube."""
        return replace(self._start, **{knob.name: knob.value(at) for knob, at in zip(self.knobs, point)})

    def point(self, values: Tune) -> Point:
        """Return the point of the unit cube that is closest to the values."""
        return tuple(knob.place(getattr(values, knob.name)) for knob in self.knobs)

    def describe(self, values: Tune) -> dict[str, int]:
        """Return the tuned values by name, without those that no setting can express: automatic choices."""
        found = {knob.name: getattr(values, knob.name) for knob in self.knobs}
        return {name: value for name, value in found.items() if value <= _LARGEST_SETTING}


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement: the bytes that were reduced, and the time in which tensors were in flight."""

    nbytes: int
    busy_ns: int

    @property
    def score(self) -> float:
        """Bytes per second."""
        return self.nbytes * 1e9 / max(self.busy_ns, 1)


# Events


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples that the last Switch requested, or `first_samples`."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Proposed:
    """The point that the search proposes."""

    point: Point


Event = Measured | Proposed

# Effects


@dataclass(frozen=True, slots=True)
class Trial:
    """Log a measurement. `is_again`: it repeats one of the best trials."""

    number: int
    at_ns: int
    values: Tune
    score: float
    is_again: bool


@dataclass(frozen=True, slots=True)
class ProposePoint:
    """Let the search propose a point. `known`: points and scores, in bytes per second, in the order of trials."""

    known: tuple[tuple[Point, float], ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """Make all ranks adopt the values, then take `samples` samples."""

    values: Tune
    samples: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The best values and their score; `first` is the score of the first trial."""

    values: Tune
    score: float
    first: float
    trials: int


Effect = Trial | ProposePoint | Switch | Finished


@dataclass(slots=True)
class _Tried:
    values: Tune
    point: Point
    score: float = 0.0
    again: list[float] = field(default_factory=list)  # the scores of its samples as a finalist


class Tuning:
    """Decides which values to try, and which of them are best."""

    def __init__(
        self, space: Space, start: Tune, default: Tune, trials: int, samples: int, warmup: int
    ) -> None:
        """`start`: the present values. `trials`: the number of trials, with `samples` samples each; the first trial has
        `warmup` more, which are discarded.
        """
        self._space = space
        self._trials = trials
        self._samples = samples
        self._warmup = warmup
        self._default = space.values(space.point(default))
        self._tried = [_Tried(start, space.point(start))]
        self._now = self._tried[0]
        self._rows = 0
        self._again: list[_Tried] | None = None  # the finalists still to be measured
        self.is_over = False

    @property
    def first_samples(self) -> int:
        """The number of samples of the first trial."""
        return self._warmup + self._samples

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return what to do next."""
        if self.is_over:
            return []
        match event:
            case Measured(samples):
                return self._measured(now_ns, samples)
            case Proposed(point):
                return [self._try(self._space.values(point))]

    def best(self) -> Finished:
        """Return the best values so far."""
        best = max(self._tried, key=lambda tried: (len(tried.again) > 0, tried.score))
        return Finished(best.values, best.score, self._tried[0].score, len(self._tried))

    def _measured(self, now_ns: int, samples: Sequence[Sample]) -> list[Effect]:
        warmup, self._warmup = self._warmup, 0
        scores = [sample.score for sample in samples[warmup:]]
        is_again = self._again is not None
        if is_again:
            self._now.again += scores
        self._now.score = median(self._now.again or scores)
        effects: list[Effect] = [Trial(self._rows, now_ns, self._now.values, median(scores), is_again)]
        self._rows += 1
        return effects + self._next()

    def _next(self) -> list[Effect]:
        if len(self._tried) < self._trials:
            if len(self._tried) == 1 and self._default != self._tried[0].values:
                return [self._try(self._default)]
            return [ProposePoint(tuple((tried.point, tried.score) for tried in self._tried))]
        if self._again is None:
            self._again = sorted(self._tried, key=lambda tried: tried.score)[-FINALISTS:] * TURNS
        if self._again:
            self._now = self._again.pop()
            return [Switch(self._now.values, self._samples)]
        self.is_over = True
        finished = self.best()
        return [Switch(finished.values, 0), finished]

    def _try(self, values: Tune) -> Switch:
        self._now = _Tried(values, self._space.point(values))
        self._tried.append(self._now)
        return Switch(values, self._samples)
