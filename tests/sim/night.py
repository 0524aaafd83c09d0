"""Simulates elasticity by night, in worlds of 2 to 1,000 nodes.

    python -m tests.sim.night --seeds 100000        # stops at the first one that fails, and prints how to replay it
    python -m tests.sim.night --seed 7              # again what has failed

Each seed runs one job of each simulator: rounds and spares (`continuing`), commits (`elastic_commits`), samples
(`elastic_samples`), and epochs of a world (`world_epochs`, at most 5 ranks). Nine of ten worlds are small; about one of
2,000 seeds has more than 30 nodes, and one of 20,000 has 1,000.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from random import Random

from tests.sim import command, elastic_commits, elastic_samples, rendezvous, world_epochs
from tests.sim.continuing import ContinuingSimulation

MOST_NODES = 1000


def draw_nodes(seed: int) -> int:
    """Return the number of nodes, or of ranks, of this seed's jobs."""
    choose = Random(seed)
    if seed % 20_000 == 19_999:
        return MOST_NODES
    chance = choose.random()
    if chance < 0.9:
        return choose.randint(2, 6)
    if chance < 0.9995:
        return choose.randint(7, 30)
    return round(math.exp(choose.uniform(math.log(30), math.log(MOST_NODES))))


def simulate(seed: int, nodes: int) -> Counter[str]:
    """Run one job of each simulator; raises Broken with the command that replays that one."""
    counts = rendezvous.simulate(seed, nodes, ContinuingSimulation)
    counts["commits: recoveries"] = elastic_commits.simulate(seed, nodes)["recoveries"]
    counts["samples: recoveries"] = elastic_samples.simulate(seed, nodes)["recoveries"]
    counts["epochs"] = world_epochs.simulate(seed, 2 + seed % 4)["epochs"]
    counts["of more than 30 nodes"] = nodes > 30
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command.main(argv, __doc__ or "", "nodes", simulate, draw_nodes)


if __name__ == "__main__":
    sys.exit(main())
