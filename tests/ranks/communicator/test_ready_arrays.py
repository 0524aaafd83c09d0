"""Arrays that need no preparation take one native call; all others, and errors, take the general way. One rank may go
one way and another rank the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks


def ready(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values)


def strided(values: np.ndarray) -> np.ndarray:
    return np.repeat(values, 2, axis=0)[::2]


def foreign_order(values: np.ndarray) -> np.ndarray:
    return np.asfortranarray(values)


def calls(world: Any, x: np.ndarray, out_of: Callable[[np.ndarray], Any]) -> None:
    """Every operation; `out_of` makes the output from the expected result."""
    rank, size, root = world.rank, world.size, world.size - 1
    everyone = [np.arange(12 * size).reshape(2 * size, 6) + 100 * each for each in range(size)]
    total: np.ndarray = np.sum(everyone, axis=0)

    def check(operation: Callable[..., Any], expected: np.ndarray) -> None:
        out = out_of(expected)
        result = operation(out=out)
        assert np.array_equal(result, expected)
        assert out is None or result is out

    check(lambda out: world.reducescatter(x, out=out), np.array_split(total, size)[rank])
    check(lambda out: world.allgather(x, out=out), np.concatenate(everyone))
    check(lambda out: world.broadcast(x, root, out=out), everyone[root])
    blocks = [np.split(each, size)[rank] for each in everyone]
    check(lambda out: world.alltoall(x, out=out), np.concatenate(blocks))
    check(
        lambda out: world.scatter(x if rank == root else None, root, out=out),
        np.split(everyone[root], size)[rank],
    )
    if rank == root:
        check(lambda out: world.reduce(x, root, out=out), total)
        check(lambda out: world.gather(x, root, out=out), np.concatenate(everyone))
    else:
        assert world.reduce(x, root) is None
        assert world.gather(x, root) is None


def mixed_ways() -> None:
    ronde.init()
    world: Any = ronde.world()
    mine = np.arange(12 * world.size).reshape(2 * world.size, 6) + 100 * world.rank
    inputs = [ready, strided, foreign_order]
    outputs: list[Callable[[np.ndarray], Any]] = [
        np.empty_like,
        lambda expected: None,
        lambda expected: strided(np.zeros_like(expected)),
    ]
    for turn in range(9):
        way = turn + world.rank
        calls(world, inputs[way % 3](mine), outputs[way // 3 % 3])


def wrong_outputs() -> None:
    """A rank whose output does not fit has an error, and takes part nevertheless; the others have their results."""
    ronde.init()
    world: Any = ronde.world()
    size = world.size
    x = np.full((size, 3), world.rank, np.float32)
    operations: dict[str, Callable[[Any], Any]] = {
        "allgather": lambda out: world.allgather(x, out=out),
        "alltoall": lambda out: world.alltoall(x, out=out),
        "scatter": lambda out: world.scatter(x if world.rank == 1 else None, 1, out=out),
    }
    rows = {"allgather": size * size, "alltoall": size, "scatter": 1}
    for name, operation in operations.items():
        right = np.empty((rows[name], 3), np.float32)
        for wrong in (np.empty((rows[name] + 1, 3), np.float32), np.empty((rows[name], 3), np.float64)):
            if world.rank == 0:
                with pytest.raises(ronde.UsageError, match=r"^out h"):
                    operation(wrong)
            else:
                assert operation(right) is right
            assert operation(right) is right


def overlapping_outputs() -> None:
    """An output that overlaps the input is refused before anything is sent."""
    ronde.init()
    world: Any = ronde.world()
    memory = np.arange(4.0 * world.size)
    x = memory[: 2 * world.size]
    for operation in (world.broadcast, world.alltoall):
        with pytest.raises(ronde.UsageError, match=r"overlaps the input|in place"):
            operation(x, out=memory[1 : 2 * world.size + 1])
    assert world.broadcast(x, out=x) is x


def refused_before() -> None:
    """All-to-all refuses an output before its first step: the other ranks need not call it, and stay in step."""
    ronde.init()
    world: Any = ronde.world()
    x = np.arange(2.0 * world.size)
    read_only = x[:]
    read_only.flags.writeable = False
    for out, message in (([1], "expected an array .* got list"), (read_only, "in place")):
        if world.rank == 0:
            with pytest.raises(ronde.UsageError, match=message):
                world.alltoall(x, out=out)
        assert np.array_equal(world.alltoall(x), np.tile(x.reshape(-1, 2)[world.rank], world.size))


def outputs_of_other_kinds() -> None:
    """An output that is neither a NumPy array nor a tensor is refused alike, whichever way the input takes."""
    ronde.init()
    world: Any = ronde.world()
    size = world.size
    lengths = {"allreduce": 2 * size, "broadcast": 2 * size, "alltoall": 2 * size}
    lengths |= {"reduce": 2 * size, "reducescatter": 2, "scatter": 2}
    lengths |= {"allgather": 2 * size**2, "gather": 2 * size**2}
    x = np.arange(2 * size, dtype=np.uint8)
    for name, length in lengths.items():
        operation = getattr(world, name)
        for given in (x, strided(x)):
            for out in (bytearray(length), memoryview(bytearray(length))):
                if world.rank == 0 or name not in ("reduce", "gather"):
                    message = (
                        rf"^out must be a NumPy array or a PyTorch tensor, not {type(out).__name__}(\.|$)"
                    )
                    with pytest.raises(ronde.UsageError, match=message):
                        operation(given, out=out)
                elif name == "gather":  # the root refuses its output when it has served the others
                    assert operation(given) is None


def rows_beyond_any_memory() -> None:
    """Their sum is 0 modulo 2^64, but an output without rows does not fit. The first rank that notices fails all."""
    ronde.init()
    world: Any = ronde.world()
    x = np.empty(([2**63 - 1, 2**63 - 1, 2][world.rank], 0), np.uint8)
    with pytest.raises((ValueError, ronde.AbortedError), match="dimension"):
        world.allgather(x, out=np.empty((0, 0), np.uint8))


def wrong_roots() -> None:
    """A root that does not exist is refused before anything is sent, also -1."""
    ronde.init()
    world: Any = ronde.world()
    x = np.ones(world.size)
    for root in (-1, world.size):
        for operation in (world.broadcast, world.reduce, world.gather, world.scatter):
            with pytest.raises(
                ronde.UsageError, match=f"root {root} is not one of the ranks 0 to {world.size - 1}"
            ):
                operation(x, root, out=np.empty_like(x))
    assert world.allreduce(x).sum() == world.size**2


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "program",
    [
        mixed_ways,
        wrong_outputs,
        overlapping_outputs,
        refused_before,
        outputs_of_other_kinds,
        rows_beyond_any_memory,
        wrong_roots,
    ],
    ids=lambda program: program.__name__,
)
def test_ready_arrays(program: Callable[[], None], transport: str) -> None:
    ranks.run(program, 3, environ={"RONDE_TRANSPORT": transport})
