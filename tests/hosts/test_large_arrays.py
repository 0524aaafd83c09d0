"""Arrays that hosts exchange piece by piece, on a slow link and with a late host, so that messages pile up."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import hosts

COUNT = 1_500_007
LATE_S = 0.3


def whole_numbers(rank: int, count: int) -> np.ndarray[Any, Any]:
    """Return float32 whose sums over a few ranks are exact."""
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float32)


def compare_with_numpy(num_hosts: int) -> None:
    """Make each call once while the ranks of each host in turn come late to it."""
    ronde.init()
    world: Any = ronde.world()
    rank, size = world.rank, world.size
    inputs = [whole_numbers(other, COUNT) for other in range(size)]
    mine, total = inputs[rank], np.sum(inputs, axis=0, dtype=np.float32)
    parts = np.array_split(total, size)
    for late in range(num_hosts):
        host = rank * num_hosts // size

        def come(is_late: bool = late == host) -> None:
            world.barrier()
            if is_late:
                time.sleep(LATE_S)

        come()
        np.testing.assert_array_equal(world.allreduce(mine, op=ronde.Sum), total)
        for root in (0, size - 1):
            come()
            result = world.reduce(mine, root, op=ronde.Sum)
            if rank == root:
                np.testing.assert_array_equal(result, total)
        come()
        np.testing.assert_array_equal(world.reducescatter(mine, op=ronde.Sum), parts[rank])
        come()
        np.testing.assert_array_equal(
            world.allgather(mine[: COUNT // 3]), np.concatenate([x[: COUNT // 3] for x in inputs])
        )
        come()
        np.testing.assert_array_equal(world.broadcast(mine, late), inputs[late])
    ronde.shutdown()


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 2), (3, 2)])
def test_every_operation_gives_the_result_of_numpy(num_hosts: int, ranks_per_host: int) -> None:
    with hosts.Hosts(num_hosts, ranks_per_host, rate="1gbit") as some:
        some.run(compare_with_numpy, num_hosts)
