"""Every operation with 64 and 128 ranks, on one host and on several, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.alone]  # it fills the machine

ROWS = (1, 3, 300)  # of each rank's part: in an announcement, in one window, in several


def values(rank: int, count: int) -> Any:
    """Small whole numbers, whose sums are exact in any order."""
    return ((np.arange(count) * 7 + rank) % 31).astype(np.float32)


def compare_all() -> int:
    """The program. Returns the number of hosts that it found."""
    ronde.init()
    world: Any = ronde.world()
    for rows in ROWS:
        compare(world, rows)
    found: int = world.cross_size
    ronde.shutdown()
    return found


def compare(world: Any, rows: int) -> None:
    size, rank, root = world.size, world.rank, world.size - 1
    count = rows * size
    mine, all_values = values(rank, count), [values(each, count) for each in range(size)]
    total = np.sum(all_values, axis=0)
    own = slice(rank * rows, (rank + 1) * rows)
    equal = np.testing.assert_array_equal
    equal(world.allreduce(mine, op=ronde.Sum), total)
    symmetric = world.empty(count, np.float32)
    symmetric[...] = mine
    equal(world.allreduce(symmetric, op=ronde.Sum, out=symmetric), total)
    equal(world.reducescatter(mine, op=ronde.Sum), total[own])
    equal(world.allgather(mine[:rows]), np.concatenate([each[:rows] for each in all_values]))
    equal(world.broadcast(mine, root), all_values[root])
    equal(world.alltoall(mine), np.concatenate([each[own] for each in all_values]))
    equal(world.scatter(mine if rank == root else None, root), all_values[root][own])
    reduced, gathered = world.reduce(mine, root, op=ronde.Sum), world.gather(mine[:rows], root)
    if rank == root:
        equal(reduced, total)
        equal(gathered, np.concatenate([each[:rows] for each in all_values]))
    world.barrier()


@pytest.mark.parametrize(("n", "hosts"), [(64, 1), (128, 1), (64, 8), (24, 24)])
def test_many_ranks_agree_with_numpy(n: int, hosts: int) -> None:
    places = [ranks.Place(environ={"RONDE_HOST_ID": f"host{rank * hosts // n}"}) for rank in range(n)]
    with ranks.start(compare_all, n, places=places) as job:
        assert job.results(500) == [hosts] * n
