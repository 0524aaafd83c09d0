"""The average of integers is one rule everywhere: the exact sum, divided, and truncated towards zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

SIZE = 3
SUMS = (-8, -7, -1, 0, 1, 7, 8)  # floor and truncation differ for those below 0

Way = Callable[[Any], Any]


def ways_of_the_world() -> list[Way]:
    world = ronde.world()
    return [
        lambda x: world.allreduce(x, op=ronde.Average),
        lambda x: world.allgather(world.reducescatter(x, op=ronde.Average)),
        lambda x: world.broadcast(world.reduce(x, op=ronde.Average) if world.rank == 0 else reduce_away(x)),
    ]


def reduce_away(x: Any) -> Any:
    ronde.world().reduce(x, op=ronde.Average)
    return x


def ways_of_the_engine() -> list[Way]:
    return [
        ronde.allreduce,  # by default
        lambda x: ronde.allreduce_async(x, "named").wait(),
        lambda x: ronde.grouped_allreduce([x, x])[1],
        lambda x: ronde.allgather(ronde.reducescatter(x)),
        lambda x: ronde.allgather(ronde.grouped_reducescatter([x])[0]),
    ]


def ways_of_torch() -> list[Way]:
    import torch

    import ronde.torch as hvd

    def way(operation: Way) -> Way:
        return lambda x: operation(torch.from_numpy(x.copy())).numpy()

    return [
        way(hvd.allreduce),
        way(hvd.allreduce_),
        way(lambda x: hvd.grouped_allreduce([x, x])[1]),
        way(lambda x: hvd.allgather(hvd.reducescatter(x))),
    ]


def ways_of_sparse_tensors() -> list[Way]:
    import torch

    import ronde.torch as hvd

    def gather(x: Any) -> Any:
        return hvd.synchronize(hvd.sparse_allreduce_async(torch.from_numpy(x).to_sparse())).to_dense().numpy()

    return [gather]


def average(ways: Callable[[], list[Way]]) -> None:
    ronde.init()
    rank = ronde.rank()
    for dtype in (np.int8, np.int32, np.int64):
        high = np.iinfo(dtype).max  # whose sum is exact all the same
        if ways is ways_of_sparse_tensors and dtype is np.int64:
            high //= SIZE  # these add in int64
        x = np.array([*(total if rank == 0 else 0 for total in SUMS), high, -high], dtype)
        expected = [*(int(total / SIZE) for total in SUMS), high, -high]
        for number, way in enumerate(ways()):
            assert way(x).tolist() == expected, (number, dtype)
    ronde.shutdown()


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(ways_of_the_world, marks=pytest.mark.slow),
        ways_of_the_engine,
        ways_of_torch,
        ways_of_sparse_tensors,
    ],
)
def test_the_average_of_integers_is_truncated(ways: Callable[[], list[Way]]) -> None:
    if ways in (ways_of_torch, ways_of_sparse_tensors):
        pytest.importorskip("torch")
    ranks.run(average, SIZE, ways)
