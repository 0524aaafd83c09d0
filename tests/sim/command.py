"""What the simulators have in common: one run that can be replayed, and a command that tries many seeds.

python -m tests.sim.rendezvous --seeds 100000 --from 20000     # stops at the first one that fails
python -m tests.sim.rendezvous --seed 7 --nodes 64             # again what has failed; the last events are printed
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.sim.common_order import Broken

CHARACTERS = 400  # of an event


class Simulated(Protocol):
    events: deque[tuple[object, ...]]

    def run(self) -> Counter[str]: ...


def run(simulation: Simulated, replay: str) -> Counter[str]:
    """Run to the end; returns what happened how often. Raises Broken with the last events and how to see them again."""
    threshold = gc.get_threshold()
    gc.set_threshold(100_000)  # else a fifth of the time goes by in looking for garbage that is not there yet
    try:
        return simulation.run()
    except Exception as error:
        story = "\n".join("  " + " ".join(map(str, event))[:CHARACTERS] for event in simulation.events)
        raise Broken(
            f"{type(error).__name__}: {error}\nlast events:\n{story}\nreplay: python -m {replay}"
        ) from error
    finally:
        gc.set_threshold(*threshold)


def main(
    argv: Sequence[str] | None,
    about: str,
    size: str,
    simulate: Callable[[int, int], Counter[str]],
    draw_size: Callable[[int], int],
) -> int:
    """The command line; returns its exit code. `size`: what a simulation has many of."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", type=int, default=100, help="how many simulations (default: %(default)s)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no simulation after so many")
    parser.add_argument(f"--{size}", type=int, dest="size", help=f"how many {size} (default: from the seed)")
    arguments = parser.parse_args(argv)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    counts: Counter[str] = Counter()
    done, end_s = 0, time.monotonic() + 60 * arguments.minutes
    try:
        for seed in seeds:
            if time.monotonic() >= end_s:
                break
            counts += simulate(seed, arguments.size or draw_size(seed))
            done += 1
    except Broken as broken:
        print(broken, flush=True)
        return 1
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{done} simulations: {told}")
    return 0
