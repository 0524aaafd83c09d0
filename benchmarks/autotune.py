"""Tunes a job of many small gradients, then compares the found values with values set by hand, in the same processes.

    python benchmarks/autotune.py --ranks 2 --rounds 9

benchmarks/README.md tells how it measures and how to read the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import product

import numpy as np
from case_tables import print_load

import ronde
from ronde.engine import process
from ronde.engine.messages import Tune
from ronde.testing import ranks

GRADIENTS = 1000
SEED = 1
FUSION_BYTES = (1, 16 << 10, 256 << 10, 1 << 20, 32 << 20)
LINGER_NS = (0, 1_000_000, 5_000_000)
LEAST_STEPS = 10
LEAST_BLOCK_S = 0.2
PATIENCE_S = 3600

FOUND = "autotune"


# Megabytes per second, one per round, by setting; the values found; the seconds that tuning took.
Result = tuple[dict[str, list[float]], list[int], float]


def stream() -> list[np.ndarray]:
    """The gradients of a model of many small layers: from 64 bytes to 16 KiB each."""
    chooser = np.random.default_rng(SEED)
    return [np.zeros(int(count), np.float32) for count in 2 ** chooser.uniform(4, 12, GRADIENTS)]


def program(trials: int, rounds: int) -> Result | None:
    """Run on every rank; rank 0 returns the result."""
    ronde.init(autotune=True, autotune_trials=trials, log_level="error")
    tensors = [(x, f"gradient {number}") for number, x in enumerate(stream())]

    def step() -> None:
        for handle in [ronde.allreduce_async(x, name, out=x) for x, name in tensors]:
            handle.wait()

    engine = process.engine()
    negotiator = engine._negotiator
    tuner = negotiator._tuner
    began = time.monotonic()
    while agreed(lambda: tuner is not None and tuner.found is None):
        for _ in range(LEAST_STEPS):
            step()
    tuning_s = time.monotonic() - began

    usual = Tune(*engine._cycle.tunables())
    if tuner is not None:
        assert tuner.found is not None
        usual = replace(tuner.found.values, batch_bytes=1 << 20, largest_fused_bytes=64 << 10)
    sets = {
        f"fusion {fusion:>9} B, linger {linger / 1e6:g} ms": replace(
            usual, fusion_bytes=fusion, linger_ns=linger
        )
        for fusion, linger in product(FUSION_BYTES, LINGER_NS)
    }
    if tuner is not None and tuner.found is not None:
        sets[FOUND] = tuner.found.values
    sets.setdefault(FOUND, usual)  # other ranks get the values from rank 0, and only count

    step_bytes = sum(x.nbytes for x, _ in tensors)
    speeds: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(rounds):
        for name, values in sets.items():
            if negotiator._coordinator is not None:
                negotiator._coordinator.tune(values)
            ronde.barrier()  # is negotiated every time, so all have switched behind it
            speeds[name].append(step_bytes / seconds_per_step(step) / 1e6)
    if ronde.rank() > 0:
        return None
    return speeds, list(astuple(sets[FOUND])), tuning_s


def agreed(wish: Callable[[], bool]) -> bool:
    """Return the value of rank 0 on all ranks."""
    return bool(ronde.broadcast(np.array([wish()], np.uint8), 0, "wish")[0])


def seconds_per_step(step: Callable[[], None]) -> float:
    """Median over enough steps."""
    step()
    times: list[float] = []
    while agreed(lambda: len(times) < LEAST_STEPS or sum(times) < LEAST_BLOCK_S):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def show(result: Result) -> None:
    """Print the table, and the result of the tuning."""
    speeds_of, found, tuning_s = result
    medians = {name: statistics.median(speeds) for name, speeds in speeds_of.items()}
    by_hand = [name for name in medians if name != FOUND]
    best = max(by_hand, key=lambda name: medians[name])
    for name, speed in medians.items():
        print(
            f"{name:40} {speed:8.1f} MB/s {speed / medians[best]:6.2f} {'  best by hand' if name == best else ''}"
        )
    chosen = max(by_hand, key=lambda name: statistics.median(speeds_of[name][::2]))
    chosen_speed = statistics.median(speeds_of[chosen][1::2])
    print(f"\ntuned for {tuning_s:.0f} s; found {Tune(*found)}")
    print(f"ratio of medians to the best by hand: {medians[FOUND] / medians[best]:.2f}")
    # The best of many is partly luck: other rounds show how good it is.
    ratio = statistics.median(speeds_of[FOUND][1::2]) / chosen_speed
    print(f"in odd rounds, to the best of even ones ({chosen}): {ratio:.2f}")


def main() -> int:
    """Run the job and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    wanted = parser.parse_args()
    print_load()
    results = ranks.run(program, wanted.ranks, wanted.trials, wanted.rounds, timeout_s=PATIENCE_S)
    if results[0] is not None:
        show(results[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
