"""Measures how fast memory and links are in this job, for the model of cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from ronde.bench.cost_model import Rates
from ronde.bench.timing import Stopwatch
from ronde.bench.traffic_counts import COPY

__all__ = ["copy_rate", "measure_rates"]

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
