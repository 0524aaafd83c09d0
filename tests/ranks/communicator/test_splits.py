"""Communicators made from communicators: who is in them, and that they do not disturb each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks


def members(group: Any) -> list[int]:
    """The world's ranks of the group, in its order; also a proof that the group works."""
    found: list[int] = group.allgather(np.array([ronde.rank()])).tolist()
    assert group.size == len(found)
    assert found[group.rank] == ronde.rank()
    total = group.allreduce(np.full(100_000, ronde.rank()))
    assert (total == sum(found)).all()
    return found


def splits() -> None:
    ronde.init()
    world: Any = ronde.world()
    parity = world.rank % 2
    peers = [rank for rank in range(world.size) if rank % 2 == parity]
    assert members(world.split(parity)) == peers
    assert members(world.split(parity, key=-world.rank)) == peers[::-1]
    assert members(world.split(7, key=0)) == list(range(world.size))  # equal keys: by rank
    assert members(world.split(world.rank)) == [world.rank]
    outsider = world.split(None if world.rank == 0 else 0)
    if world.rank == 0:
        assert outsider is None
    else:
        assert members(outsider) == list(range(1, world.size))
    assert world.split(None) is None
    assert members(world) == list(range(world.size))
    ronde.shutdown()


def groups() -> None:
    ronde.init()
    world: Any = ronde.world()
    last = world.size - 1
    chosen = world.group([last, 0])
    if world.rank in (0, last):
        assert members(chosen) == [last, 0]
        assert chosen.rank == (1 if world.rank == 0 else 0)
    else:
        assert chosen is None
    alone = world.group([1])
    assert (alone is None) == (world.rank != 1)
    assert world.group([]) is None
    assert members(world.group(range(world.size))) == list(range(world.size))
    for wrong in ([0, 0], [world.size], [-1]):
        with pytest.raises(ronde.UsageError, match=f"ranks must be distinct numbers from 0 to {last}, not"):
            world.group(wrong)
    with pytest.raises(ronde.UsageError, match="a color must be None or a whole number >= 0, not -1"):
        world.split(-1)
    ronde.shutdown()


def contradicting_groups() -> None:
    """Every rank gets the error, which names two lists and their ranks; then the next call works."""
    ronde.init()
    world: Any = ronde.world()
    outer = world.rank in (0, 3)
    wrong: list[tuple[Any, bool, str]] = [
        (
            [0, 3] if outer else [1, 2],
            False,
            r"rank 0 called group\(\[0, 3\]\), but rank 1 called group\(\[1, 2\]\)",
        ),
        (
            [1, 0] if world.rank == 2 else [0, 1],
            False,
            r"rank 0 .*\(\[0, 1\]\), but rank 2 called group\(\[1, 0\]\)",
        ),
        (
            [] if world.rank == 3 else [3],
            False,
            r"rank 0 called group\(\[3\]\), but rank 3 called group\(\[\]\)",
        ),
        ([world.rank], world.rank > 1, r"\(\[0\]\), but rank 1 called group\(\[1\]\).* with disjoint=True$"),
        (
            range(4),
            world.rank == 3,
            r"\[0, 1, 2, 3\]\), but rank 3 called group\(\[0, 1, 2, 3\], disjoint=True\)",
        ),
        (
            [2, 3] if world.rank == 3 else [0, 1, 2] if world.rank < 2 else [2],
            True,
            r"rank 0 called group\(\[0, 1, 2\], disjoint=True\), but rank 2 called group\(\[2\], disjoint=True\)",
        ),
        (
            [1, 2] if world.rank == 2 else [],
            True,
            r"rank 2 called group\(\[1, 2\], .*, but rank 1 called group\(\[\]",
        ),
    ]
    for listed, disjoint, error in wrong:
        with pytest.raises(ronde.MismatchError, match=error):
            world.group(listed, disjoint=disjoint)
        assert members(world.group(range(4))) == [0, 1, 2, 3]
    ronde.shutdown()


def disjoint_groups() -> None:
    ronde.init()
    world: Any = ronde.world()
    mine = [3, 0] if world.rank in (0, 3) else [1, 2]
    assert members(world.group(mine, disjoint=True)) == mine
    assert members(world.group([world.rank], disjoint=True)) == [world.rank]
    some = world.group([2, 1] if world.rank in (1, 2) else [], disjoint=True)
    if world.rank in (1, 2):
        assert members(some) == [2, 1]
    else:
        assert some is None
    other = (world.rank + 1) % world.size
    with pytest.raises(
        ronde.UsageError, match=rf"rank {world.rank} lists \[{other}\]; a rank without a group passes \[\]"
    ):
        world.group([other], disjoint=True)
    ronde.shutdown()


def nested() -> None:
    """Halves of halves, which work at their own pace, and all of them interleaved."""
    ronde.init()
    world: Any = ronde.world()
    half = world.split(world.rank // 2)
    one = half.split(half.rank)
    cross = world.split(world.rank % 2)
    for step in range(50):
        assert half.allreduce(np.array([world.rank]))[0] == sum(members_of_half(world.rank))
        if world.rank < 2:  # this half makes many more calls than the other
            for _ in range(step % 5):
                assert (half.allreduce(np.ones(5000)) == 2).all()
        assert one.allreduce(np.array([world.rank]))[0] == world.rank
        assert cross.allreduce(np.array([world.rank]))[0] == 2 * (world.rank % 2) + 2
        assert world.allreduce(np.array([1]))[0] == 4
    grandchild = half.split(0, key=-half.rank)
    assert members(grandchild) == members_of_half(world.rank)[::-1]
    ronde.shutdown()


def members_of_half(rank: int) -> list[int]:
    return [0, 1] if rank < 2 else [2, 3]


def symmetric_memory() -> None:
    """A group has symmetric memory of its own; in another group the same array is like any other."""
    ronde.init()
    world: Any = ronde.world()
    half = world.split(world.rank // 2)
    ours, everyones = half.empty(50_000), world.empty(50_000)
    for _ in range(20):
        for group, x in ((half, ours), (world, everyones), (world, ours), (half, everyones)):
            x[:] = group.rank + 1
            group.allreduce(x, out=x)
            assert (x == group.size * (group.size + 1) / 2).all()
    del half
    ours[:] = 1  # the memory outlives the group
    ronde.shutdown()
    assert ours.sum() == 50_000


def threads() -> None:
    """Two groups of the same ranks, each driven by its own thread."""
    from concurrent.futures import ThreadPoolExecutor

    ronde.init()
    world: Any = ronde.world()

    def work(group: Any) -> bool:
        return all((group.allreduce(np.ones(size)) == group.size).all() for size in range(1, 20_000, 199))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, [world.split(0), world.split(0, key=-world.rank)]))
    ronde.shutdown()


def local_shutdown() -> None:
    """A group may end before the world does."""
    ronde.init()
    world: Any = ronde.world()
    half = world.split(world.rank // 2)
    half.barrier()
    half.shutdown()
    with pytest.raises(ronde.UsageError, match="this communicator has been shut down"):
        half.barrier()
    assert members(world) == list(range(world.size))
    grandchild = world.split(0)
    ronde.shutdown()
    with pytest.raises(ronde.UsageError, match="this communicator has been shut down"):
        grandchild.barrier()


PROGRAMS = [
    splits,
    groups,
    contradicting_groups,
    disjoint_groups,
    nested,
    symmetric_memory,
    threads,
    local_shutdown,
]


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_groups_of_four(program: Any, transport: str) -> None:
    ranks.run(program, 4, environ={"RONDE_TRANSPORT": transport})
