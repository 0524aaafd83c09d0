"""`python -m ronde.bench`, in each rank of `ronde bench`: measures, and prints the report on rank 0."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import ronde
from ronde.bench.collective_traffic import OPERATIONS, JobShape
from ronde.bench.report import (
    BenchResults,
    CallTime,
    SettingTrial,
    as_json,
    describe,
    size_text,
    trials_for,
)
from ronde.bench.timing import Stopwatch, copy_rate, measure_rates, operation_call
from ronde.process.resources import available_memory

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SMALLEST_COPY = 64 << 10
ARRAYS = 4  # of a size that a rank holds at the same time
TURNS = 2
USAGE_ERROR = 2
PARTS = (0.2, 0.6, 0.2)  # of the time, for rates, calls and trials


class Bench:
    """The measurements of one rank."""

    def __init__(self, seconds: float, largest: int) -> None:
        self.world: Any = ronde.world()
        self.stopwatch = Stopwatch(self.world)
        self.shape = JobShape(self.world.cross_size, self.world.local_size)
        room = np.array([available_memory() // (2 * ARRAYS * self.world.local_size)])
        least_room = int(self.world.allreduce(room, op=ronde.Min)[0])
        self.sizes = [size for size in SIZES if size <= min(largest, least_room)] or [SIZES[0]]
        self.seconds = seconds
        self.skipped: list[str] = []
        self._start = time.monotonic()

    def measure(self) -> BenchResults:
        """Return all results; every rank gets the same, but for the trials, which end the world."""
        rates_s, calls_s, trials_s = (self.seconds * part for part in PARTS)
        copies = {max(size, SMALLEST_COPY) for size in self.sizes}
        memory = {
            size: copy_rate(self.world, self.stopwatch, size, rates_s / 2 / len(copies))
            for size in sorted(copies)
        }
        rates = measure_rates(self.world, self.stopwatch, memory[max(memory)], rates_s / 2)
        wanted = [("allreduce", True), *((operation, False) for operation in OPERATIONS)]
        each_s = calls_s / (len(wanted) * len(self.sizes))
        times: list[CallTime] = []
        for operation, is_symmetric in wanted:
            times += self._times_of(operation, is_symmetric, memory, each_s)
        planned = trials_for(self.shape, max(self.sizes))
        trials = [] if self._is_late() else [self._try(each, trials_s / len(planned)) for each in planned]
        return BenchResults(self.shape, rates, tuple(times), tuple(trials), tuple(self.skipped))

    def _is_late(self) -> bool:
        """Return whether twice the time has passed on some rank."""
        passed = np.array([time.monotonic() - self._start])
        return float(self.world.allreduce(passed, op=ronde.Max)[0]) > 2 * self.seconds

    def _times_of(
        self, operation: str, is_symmetric: bool, memory: dict[int, float], budget_s: float
    ) -> list[CallTime]:
        times: list[CallTime] = []
        for size in self.sizes:
            is_large = bool(times) and times[-1].nbytes >= SMALLEST_COPY
            if self._is_late() or (
                is_large and times[-1].seconds * size / times[-1].nbytes > self.seconds / 4
            ):
                self.skipped.append(f"{operation} from {size_text(size)} on")
                break
            call = operation_call(self.world, operation, size, is_symmetric)
            seconds = self.stopwatch.seconds(call, budget_s)
            times.append(CallTime(operation, size, seconds, memory[max(size, SMALLEST_COPY)], is_symmetric))
        return times

    def _try(self, trial: SettingTrial, budget_s: float) -> SettingTrial:
        usual, other = [], []
        for _ in range(TURNS):
            usual.append(self._seconds_with({}, trial.nbytes, budget_s / (2 * TURNS)))
            name = trial.variable.removeprefix("RONDE_").lower()
            other.append(self._seconds_with({name: trial.value}, trial.nbytes, budget_s / (2 * TURNS)))
        return replace(trial, seconds=tuple(other), usual_seconds=tuple(usual))

    def _seconds_with(self, settings: dict[str, Any], nbytes: int, budget_s: float) -> float:
        ronde.shutdown()
        ronde.init(**settings)
        self.world = ronde.world()
        call = operation_call(self.world, "allreduce", nbytes)
        return Stopwatch(self.world).seconds(call, budget_s)


def main(argv: Sequence[str]) -> int:
    """Measure as one rank of a job; return the exit code."""
    parser = argparse.ArgumentParser(prog="ronde bench")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--largest", type=int, required=True)
    options = parser.parse_args(argv)
    ronde.init()
    is_first = ronde.rank() == 0
    if mistake := _mistake():
        if is_first:
            print(f"ronde bench: {mistake}", file=sys.stderr, flush=True)
        ronde.shutdown()
        return USAGE_ERROR
    results = Bench(options.seconds, options.largest).measure()
    if is_first:
        text = json.dumps(as_json(results), indent=2) + "\n" if options.json else describe(results)
        print(text, end="", flush=True)
    ronde.shutdown()
    return 0


def _mistake() -> str:
    if ronde.size() == 1:
        return "one rank has no other to communicate with: start two or more, as in ronde bench -n 2"
    if not ronde.is_homogeneous():
        return "the hosts have different numbers of ranks: give each the same number, as in -H a:2,b:2"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
