"""`python -m ronde.bench`, in each rank of `ronde bench`: measures, and prints the report on rank 0."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ronde
from ronde.bench.collective_traffic import OPERATIONS, JobShape
from ronde.bench.cost_model import Rates
from ronde.bench.report import (
    BenchResults,
    CallTime,
    SettingTrial,
    as_json,
    describe,
    size_text,
    trials_for,
)
from ronde.bench.traffic_counts import COPY
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


BLOCKS = 5
MOST_CALLS = 1000  # in a block

Call = Callable[[], object]
Vector = NDArray[np.float32]


class Stopwatch:
    """Times calls on the ranks of a communicator. All ranks make the same calls, and get the same times."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def seconds(self, call: Call, budget_s: float) -> float:
        """Return the time of one call on the slowest rank: the median of some blocks of calls."""
        call()  # grows buffers
        calls = int(min(max(budget_s / (BLOCKS * max(self._block(call, 1), 1e-7)), 1), MOST_CALLS))
        return float(np.median([self._block(call, calls) / calls for _ in range(BLOCKS)]))

    def _block(self, call: Call, calls: int) -> float:
        self._world.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took = np.array([time.perf_counter() - start])
        return float(self._world.allreduce(took, op=ronde.Max)[0])


def operation_call(world: Any, operation: str, nbytes: int, is_symmetric: bool = False) -> Call:
    """Return a call of the operation. An all-gather and a gather get a part of `nbytes` from each rank."""
    count = max(nbytes // 4, 1)
    part = max(count // world.size, 1)

    def vector(length: int) -> Vector:
        x: Vector = world.empty(length, np.float32) if is_symmetric else np.empty(length, np.float32)
        x[...] = 0
        return x

    if operation in ("allgather", "gather"):
        x, out = vector(part), vector(part * world.size)
        if operation == "allgather":
            return lambda: world.allgather(x, out=out)
        return lambda: world.gather(x, 0, out=out if world.rank == 0 else None)
    x = vector(part * world.size)
    if operation == "allreduce":
        return lambda: world.allreduce(x, op=ronde.Sum, out=x)
    if operation == "broadcast":
        return lambda: world.broadcast(x, 0, out=x)
    if operation == "reduce":
        return lambda: world.reduce(x, 0, op=ronde.Sum, out=x if world.rank == 0 else None)
    out = vector(x.size if operation == "alltoall" else part)
    if operation == "alltoall":
        return lambda: world.alltoall(x, out=out)
    if operation == "reducescatter":
        return lambda: world.reducescatter(x, op=ronde.Sum, out=out)
    return lambda: world.scatter(x if world.rank == 0 else None, 0, out=out)


LARGE_BYTES = 4 << 20
BURST = 50  # small messages


def copy_rate(world: Any, stopwatch: Stopwatch, nbytes: int, budget_s: float) -> float:
    """Return what all ranks of a host together move when each copies `nbytes`, in bytes of whole lines per second."""
    source, target = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    took = stopwatch.seconds(lambda: np.copyto(target, source), budget_s)
    return COPY * nbytes * float(world.local_size) / took


def measure_rates(world: Any, stopwatch: Stopwatch, memory_bytes_per_s: float, budget_s: float) -> Rates:
    """Return the rates of this job, whose hosts have equally many ranks. All ranks call it."""
    each_s = budget_s / 4
    host = world.split(world.cross_rank, world.rank)
    meet_s = stopwatch.seconds(host.barrier, each_s) if world.local_size > 1 else 0.0
    host.shutdown()
    if world.cross_size == 1:
        return Rates(memory_bytes_per_s, meet_s)
    rail = world.split(world.local_rank, world.rank)
    tiny, large = np.zeros(1, np.uint8), np.zeros(LARGE_BYTES, np.uint8)

    def ping_pong() -> None:
        if world.local_rank == 0 and rail.rank < 2:
            for turn in (0, 1):
                _send(rail, tiny, turn, 1 - turn)

    def burst() -> None:
        for _ in range(BURST if world.local_rank == 0 else 0):
            _send(rail, tiny, 0, 1)

    frame_s = stopwatch.seconds(burst, each_s) / BURST
    # The message of a ping costs both ends a frame.
    message_s = max(stopwatch.seconds(ping_pong, each_s) / 2 - 2 * frame_s, 0.0)
    large_s = stopwatch.seconds(lambda: _send(rail, large, 0, 1), each_s)
    rail.shutdown()
    return Rates(memory_bytes_per_s, meet_s, LARGE_BYTES * world.local_size / large_s, message_s, frame_s)


def _send(rail: Any, x: Any, sender: int, receiver: int) -> None:
    if rail.rank == sender:
        rail.send(x, receiver)
    elif rail.rank == receiver:
        rail.recv(x, sender)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
