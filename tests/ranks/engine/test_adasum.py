"""Adasum against its formula in NumPy: by the communicator and by the engine, on one host and over several."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tests.ranks.programs import my_rank

import ronde
from ronde.errors import MismatchError, UsageError
from ronde.testing import ranks

Array = npt.NDArray[Any]

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
TOLERANCE = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-5, "float64": 1e-12}
SHAPES = [(), (0,), (7,), (5, 3), (1000,), (100_003,)]


def combined(a: Array, b: Array) -> Array:
    ab, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def adasum(vectors: list[Array]) -> Array:
    """What it should be, in float64."""
    vectors = [np.asarray(vector, np.float64) for vector in vectors]
    while len(vectors) > 1:
        vectors = [combined(a, b) for a, b in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def values(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """What that rank passes: partly the same as the others."""
    common = np.random.default_rng(seed).normal(size=shape)
    own = np.random.default_rng([seed, rank + 1]).normal(size=shape)
    return np.asarray(
        common * (rank + 1) + own, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    )


def assert_is(result: Array, expected: Array) -> None:
    """It is that but for rounding, and bitwise the same on all ranks."""
    tolerance = TOLERANCE[result.dtype.name] * max(np.abs(expected).max(initial=0), 1)
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=0, atol=tolerance)
    raw = np.frombuffer(result.tobytes(), np.uint8)
    everyones = ronde.world().allgather(raw).reshape(ronde.size(), -1)
    assert (everyones == raw).all()


# The communicator


def arrays(world: Any) -> None:
    for dtype in TOLERANCE:
        for shape in SHAPES:
            x = values(world.rank, shape, dtype)
            expected = adasum([values(rank, shape, dtype) for rank in range(world.size)])
            before = x.copy()
            result = world.allreduce(x, op=ronde.Adasum)
            assert result.dtype == x.dtype
            assert (x == before).all()
            assert_is(result, expected)
            symmetric, elsewhere = world.empty(x.shape, x.dtype), world.empty(x.shape, x.dtype)
            symmetric[...] = x
            assert_is(world.allreduce(symmetric, op=ronde.Adasum, out=elsewhere), expected)
            assert (symmetric == x).all()
            for place in (x, symmetric):
                assert world.allreduce(place, op=ronde.Adasum, out=place) is place
                assert_is(place, expected)


def properties(world: Any) -> None:
    """Orthogonal vectors add up, equal ones average, zeros change nothing."""
    rank, size = world.rank, world.size
    for length in (40, 100_000):
        orthogonal = np.zeros(length, np.float32)
        orthogonal[rank::size] = rank + 1
        total = world.allreduce(orthogonal)
        assert (world.allreduce(orthogonal, op=ronde.Adasum) == total).all()
        equal = values(9, (length,), "float32")
        assert (world.allreduce(equal, op=ronde.Adasum) == equal).all()
        lonely = equal if rank == size - 1 else np.zeros_like(equal)
        assert (world.allreduce(lonely, op=ronde.Adasum) == equal).all()
        assert (world.allreduce(np.zeros_like(equal), op=ronde.Adasum) == 0).all()
        # Twice as long on one rank: the result lies between, and scales with all.
        x = values(rank, (length,), "float64")
        once, twice = world.allreduce(x, op=ronde.Adasum), world.allreduce(2 * x, op=ronde.Adasum)
        assert (twice == 2 * once).all()
        # Also where squares leave the range of float64, by themselves or only on some ranks.
        for factor in (2.0**700, 2.0**-700):
            assert_is(world.allreduce(factor * x, op=ronde.Adasum) / factor, once)
        huge = (x if rank == 0 else np.zeros_like(x)) * 1e200
        lone = values(0, (length,), "float64") * 1e200
        assert (world.allreduce(huge, op=ronde.Adasum) == lone).all()
        # The quotient of their scales would be infinite.
        apart = orthogonal * np.float64(1e200 if rank == size - 1 else 1e-200)
        assert (world.allreduce(apart, op=ronde.Adasum) == world.allreduce(apart)).all()
        # Parallel vectors average, also where the weight of the short ones is beyond the range of float64.
        for short, long in ((1e-200, 1e200), (1e-300, 1e300), (1.0, 1e300)):
            parallel = np.full(length, long if rank == size - 1 else short)
            assert_is(world.allreduce(parallel, op=ronde.Adasum) / long, np.full(length, 1 / size))


# The engine: tensors that are fused have weights of their own


def named_tensors() -> None:
    shapes = [(i % 5, 3 + i) for i in range(40)] + [(70_000,), (), (300, 100)]
    for step in range(3):  # negotiated, then cached
        given = [values(ronde.rank(), shape, "float32", step) for shape in shapes]
        others = [[values(r, shape, "float32", step) for shape in shapes] for r in range(ronde.size())]
        handles = [
            ronde.allreduce_async(x, f"t{i}", ronde.Adasum, out=x if i % 2 else None)
            for i, x in enumerate(given)
        ]
        for i, handle in enumerate(handles):
            assert_is(handle.wait(), adasum([buffers[i] for buffers in others]))
    half = ronde.allreduce(np.ones(9), "scaled", ronde.Adasum, prescale_factor=4, postscale_factor=0.125)
    assert (half == 0.5).all()


def agrees_with_numpy() -> None:
    ronde.init()
    arrays(ronde.world())
    properties(ronde.world())
    named_tensors()
    ronde.shutdown()


@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@ON_BOTH
def test_it_agrees_with_numpy(n: int, transport: str) -> None:
    ranks.run(agrees_with_numpy, n, environ={"RONDE_TRANSPORT": transport})


# What it refuses


def three_ranks() -> None:
    ronde.init()
    x = np.ones(5, np.float32)
    for call in (ronde.world().allreduce, ronde.allreduce):
        with pytest.raises(
            UsageError, match=r"ranks in pairs.* there must be 2, 4, 8 .*power of two of them, not 3"
        ):
            call(x, op=ronde.Adasum)
        assert (call(x, op=ronde.Sum) == 3).all()
    ronde.shutdown()


@ON_BOTH
def test_three_ranks_are_refused_everywhere(transport: str) -> None:
    ranks.run(three_ranks, 3, environ={"RONDE_TRANSPORT": transport})


def other_misuse() -> None:
    ronde.init()
    world: Any = ronde.world()
    for dtype in (np.int32, np.bool_, np.complex64):
        for call in (world.allreduce, ronde.allreduce):
            with pytest.raises(
                UsageError, match=f"no adasum of {np.dtype(dtype).name} values: it needs float16"
            ):
                call(np.ones(3, dtype), op=ronde.Adasum)
    for call in (world.reduce, world.reducescatter, ronde.reducescatter):
        with pytest.raises(UsageError, match="dasum combines whole vectors: only allreduce has it"):
            call(np.ones(4), op=ronde.Adasum)
    op = ronde.Adasum if world.rank == 0 else ronde.Sum
    with pytest.raises(MismatchError, match="Adasum"):
        ronde.allreduce(np.ones(4), "mixed", op)
    assert (ronde.allreduce(np.ones(4), "mixed", ronde.Adasum) == 1).all()
    with pytest.raises(MismatchError, match="adasum"):
        world.allreduce(np.ones(100_000), op=op)
    assert (world.allreduce(np.ones(100_000), op=ronde.Adasum) == 1).all()
    ronde.shutdown()


def test_what_it_cannot_do_is_said() -> None:
    ranks.run(other_misuse, 2)


# The hierarchical variant: hosts are combined, each the average of its ranks


def hierarchical(hosts: list[int]) -> None:
    ronde.init(host_id=f"host {hosts[my_rank()]}", adasum_hierarchical=True)
    world: Any = ronde.world()
    for dtype in ("float32", "bfloat16"):
        for shape in [(0,), (3,), (100_003,)]:
            given = [values(rank, shape, dtype) for rank in range(world.size)]
            averages = [
                np.mean([x.astype(np.float64) for x, own in zip(given, hosts) if own == host], axis=0)
                for host in sorted(set(hosts))
            ]
            expected = adasum(averages)
            assert_is(world.allreduce(given[world.rank], op=ronde.Adasum), expected)
            assert_is(ronde.allreduce(given[world.rank], f"{dtype} {shape}", ronde.Adasum), expected)
    ronde.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 1], [0, 0, 0]], ids=str)
def test_hierarchical(hosts: list[int]) -> None:
    ranks.run(hierarchical, len(hosts), hosts)


def three_hosts() -> None:
    ronde.init(host_id=f"host {min(my_rank(), 2)}", adasum_hierarchical=True)
    with pytest.raises(UsageError, match=r"combines hosts in pairs.* not 3 as here"):
        ronde.allreduce(np.ones(5), op=ronde.Adasum)
    assert (ronde.allreduce(np.ones(5)) == 1).all()
    ronde.shutdown()


def test_three_hosts_are_refused() -> None:
    ranks.run(three_hosts, 4)
