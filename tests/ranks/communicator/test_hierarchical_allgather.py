"""All-gather between hosts with several ranks each: along rails, or flat where hosts differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import ronde
from ronde.testing import ranks


def gather_uneven_blocks(rounds: Sequence[int]) -> None:
    ronde.init()
    world = ronde.world()
    for rows in rounds:
        counts = [rows * (each % 3) + each % 2 for each in range(world.size)]  # some have none
        mine = np.full((counts[world.rank], 3), world.rank, np.int16)
        whole = np.concatenate([np.full((count, 3), each, np.int16) for each, count in enumerate(counts)])
        assert np.array_equal(world.allgather(mine), whole)
        assert np.array_equal(ronde.allgather(mine, name="rows"), whole)
        shared = world.empty((world.size, 4))
        world.allgather(np.full((1, 4), world.rank, np.float32), out=shared)
        assert shared[:, 0].tolist() == list(range(world.size))
    ronde.shutdown()


@pytest.mark.parametrize("is_hierarchical", ["1", "0"])
@pytest.mark.parametrize(
    "hosts", ["aabb", *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("abab", "aabbcc", "aabbb"))]
)
def test_hosts_with_several_ranks(hosts: str, is_hierarchical: str) -> None:
    places = [
        ranks.Place(environ={"RONDE_HOST_ID": host, "RONDE_HIERARCHICAL_ALLGATHER": is_hierarchical})
        for host in hosts
    ]
    with ranks.start(gather_uneven_blocks, len(hosts), (0, 1, 7, 20_000), places=places) as job:
        job.results()
