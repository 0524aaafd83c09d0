"""More than 2^31 elements: nothing counts in 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

COUNT = 2**31 + 17
BLOCK = 251 << 18  # a multiple of the pattern's period, which is no power of two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.alone]  # it fills gigabytes


def fill(x: Any, rank: int) -> None:
    pattern = np.tile(np.arange(251, dtype=np.uint8) // 8 + np.uint8(100 * rank), BLOCK // 251)
    for start in range(0, len(x), BLOCK):
        x[start : start + BLOCK] = pattern[: len(x) - start]


def check(x: Any, ranks_summed: list[int]) -> None:
    """`x` is the sum of what these ranks have filled in."""
    pattern = np.zeros(BLOCK, np.uint8)
    one = np.empty_like(pattern)
    for rank in ranks_summed:
        fill(one, rank)
        pattern += one
    for start in range(0, len(x), BLOCK):
        part = x[start : start + BLOCK]
        assert np.array_equal(part, pattern[: len(part)]), f"wrong somewhere from element {start} on"


def allreduce(world: Any) -> None:
    x = np.empty(COUNT, np.uint8)
    fill(x, world.rank)
    world.allreduce(x, out=x)
    check(x, [0, 1])


def allreduce_in_symmetric_memory(world: Any) -> None:
    x = world.empty(COUNT, np.uint8)
    fill(x, world.rank)
    world.allreduce(x, out=x)
    check(x, [0, 1])


def allgather(world: Any) -> None:
    x = np.empty(COUNT // 2 + world.rank, np.uint8)
    fill(x, world.rank)
    gathered = world.allgather(x)
    assert gathered.size == COUNT
    check(gathered[: COUNT // 2], [0])
    check(gathered[COUNT // 2 :], [1])


def broadcast(world: Any) -> None:
    x = np.empty(COUNT, np.uint8)
    fill(x, world.rank)
    world.broadcast(x, root=1, out=x)
    check(x, [1])


def send(world: Any) -> None:
    x = np.empty(COUNT, np.uint8)
    if world.rank == 0:
        fill(x, 0)
        world.send(x, 1)
    else:
        world.recv(x, 0)
        check(x, [0])


def run(name: str) -> None:
    ronde.init()
    globals()[name](ronde.world())
    ronde.shutdown()


PRIVATE = ["allreduce", "allgather", "broadcast", "send"]


@pytest.mark.parametrize(
    ("transport", "name"),
    [("auto", "allreduce_in_symmetric_memory")]
    + [(way, name) for way in ("auto", "tcp") for name in PRIVATE],
)
def test_more_than_2_to_the_31_elements(transport: str, name: str) -> None:
    ranks.run(run, 2, name, environ={"RONDE_TRANSPORT": transport}, timeout_s=300)
