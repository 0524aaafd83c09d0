"""Measures calls of all ranks together within a given time, and the rates of memory and links for the model of cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ronde
from ronde.bench.cost_model import Rates
from ronde.bench.traffic_counts import COPY

__all__ = ["Call", "Stopwatch", "Vector", "copy_rate", "measure_rates", "operation_call"]

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
