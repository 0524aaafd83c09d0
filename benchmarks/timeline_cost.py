"""Measures the cost of a timeline that is on: the same steps with it and without, in turns, on the same ranks.

    python benchmarks/timeline_cost.py --ranks 2 --rounds 15

A turn is a block of steps with the timeline on and one with it off, right after each other, in an order that changes.
The table shows the medians over turns, and the median of each turn's ratio, which depends little on the machine's other
load. The last column is the same for the processor time of all threads of all ranks, which other programs on
the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

from case_tables import print_load

import ronde
from ronde.testing import ranks

BLOCK_S = 0.3
WARM_UP_STEPS = 3
CASES = {  # an operation of RondeTorch and its argument
    "resnet50": ("resnet50", 1),
    "small 1000": ("small", 1),
    "cnn": ("cnn", 1),
    "mlp": ("mlp", 1),
    "burst 100 x 4 KiB": ("burst", 1 << 10),
    "single 4 B": ("single", 1),
}


Block = tuple[float, float]  # seconds per step on one rank: those that pass, and those of its processors
Turn = tuple[Block, Block]  # with the timeline, without


def program(operation: str, argument: int, rounds: int, folder: str) -> list[Turn]:
    """Run on every rank; return its turns."""
    from contestants.horovod_like import RondeTorch

    contestant = RondeTorch()
    call, meet = getattr(contestant, operation)(argument), contestant.barrier()
    for _ in range(WARM_UP_STEPS):
        call()
    began = time.perf_counter()
    call()
    steps = max(3, int(BLOCK_S / max(contestant.from_all(time.perf_counter() - began))))
    turns = []
    for round_ in range(rounds):
        blocks = {}
        for is_on in (True, False) if round_ % 2 else (False, True):
            if is_on:
                ronde.start_timeline(folder + "/")
            blocks[is_on] = measure(meet, call, steps)
            ronde.stop_timeline()
        turns.append((blocks[True], blocks[False]))
    return turns


def measure(meet: Callable[[], None], call: Callable[[], None], steps: int) -> Block:
    meet()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        call()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def print_case(name: str, of_ranks: list[list[Turn]]) -> None:
    wall = [tuple(max(block[0] for block in blocks) for blocks in zip(*turns)) for turns in zip(*of_ranks)]
    cpu = [tuple(sum(block[1] for block in blocks) for blocks in zip(*turns)) for turns in zip(*of_ranks)]
    on, off = (statistics.median(each) * 1e6 for each in zip(*wall))
    added, added_cpu = (statistics.median(a / b for a, b in each) - 1 for each in (wall, cpu))
    print(f"{name:<20}{off:>12,.1f}{on:>12,.1f}{added:>9.1%}{added_cpu:>12.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--rounds", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    options = parser.parse_args()
    print_load()
    print(f"{'case':<20}{'off, us':>12}{'on, us':>12}{'added':>9}{'added cpu':>12}")
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="ronde-timeline-") as folder:
            print_case(name, ranks.run(program, options.ranks, *CASES[name], options.rounds, folder))


if __name__ == "__main__":
    main()
