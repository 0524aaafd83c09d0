"""Measures calls of all ranks together, within a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ronde

__all__ = ["Call", "Stopwatch", "Vector", "operation_call"]

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
