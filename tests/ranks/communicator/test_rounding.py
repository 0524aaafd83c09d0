"""Sums of 16-bit floats are float32 sums, rounded once: for every operation, algorithm and topology.

The reference adds up in float32, in rank order. Where the order of a sum is another one, the values are such that
float32 sums are exact: then all orders give the same bits, but sums that are rounded on their way give others.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import ronde
from ronde.testing import ranks

Array = npt.NDArray[Any]

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
COUNTS = (9, 1000, 50_000, 300_001)  # small messages, and those that are cut into shards and segments


def values(rank: int, count: int, dtype: np.dtype[Any], is_exact: bool) -> Array:
    """Large and small numbers, so that a sum needs more bits than the type has; after 9973 they come again."""
    rng = np.random.default_rng([count, rank])
    drawn = min(count, 9973)
    magnitudes = rng.choice([1, 2**7, 2**13] if is_exact else [1e-3, 1, 3e4], drawn)
    numbers = rng.integers(-7, 8, drawn) if is_exact else rng.normal(size=drawn)
    return np.resize(np.asarray(np.clip(numbers * magnitudes, -60_000, 60_000), dtype), count)


def combined(inputs: list[Array], op: Any) -> Array:
    total = inputs[0].astype(np.float32)
    for x in inputs[1:]:
        total = total * x.astype(np.float32) if op is ronde.Product else total + x.astype(np.float32)
    if op is ronde.Average:
        total = total / np.float32(len(inputs))
    with np.errstate(over="ignore"):
        return total.astype(inputs[0].dtype)


def assert_same_bits(result: Array, expected: Array, what: object) -> None:
    assert result.dtype == expected.dtype
    differ = np.flatnonzero(result.view(np.uint16) != expected.view(np.uint16))
    assert differ.size == 0, f"{what}: {differ.size} of {result.size} differ, the first at {differ[0]}"


def reduce_everywhere(is_ordered: bool) -> None:
    """The communicator's operations; `is_ordered`: the topology guarantees rank order."""
    ronde.init()
    world: Any = ronde.world()
    for dtype in DTYPES:
        for count in COUNTS:
            inputs = [values(rank, count, dtype, not is_ordered) for rank in range(world.size)]
            x = inputs[world.rank]
            for op in (ronde.Sum, ronde.Average):
                what, expected = (dtype, count, op), combined(inputs, op)
                assert_same_bits(world.allreduce(x, op=op), expected, ("allreduce", *what))
                symmetric = world.empty(x.shape, dtype)
                symmetric[:] = x
                assert_same_bits(
                    world.allreduce(symmetric, op=op, out=symmetric), expected, ("in place", *what)
                )
                for root in (0, world.size - 1):
                    result = world.reduce(x, root, op=op)
                    if world.rank == root:
                        assert_same_bits(result, expected, ("reduce", root, *what))
                share = np.array_split(expected, world.size)[world.rank]
                assert_same_bits(world.reducescatter(x, op=op), share, ("reducescatter", *what))
    ones = np.full(70_000, 1 + 2**-8, np.float16)  # products are rounded once, too
    powers = combined([ones] * world.size, ronde.Product)
    assert_same_bits(world.allreduce(ones, op=ronde.Product), powers, "product")
    ronde.shutdown()


def average_large_values() -> None:
    """What is too large for float16 on the way does not make the result infinite; by name, fused and with factors."""
    ronde.init()
    size = ronde.size()
    x = np.full(2000, 40_000, np.float16)
    for _ in range(2):  # negotiated, then cached
        handles = [ronde.allreduce_async(x, f"mean {i}", ronde.Average) for i in range(5)]
        handles += [
            ronde.allreduce_async(x, f"scaled sum {i}", ronde.Sum, postscale_factor=1 / size)
            for i in range(3)
        ]
        handles += [
            ronde.allreduce_async(x, f"twice {i}", ronde.Average, prescale_factor=2, postscale_factor=0.5)
            for i in range(3)
        ]
        for handle in handles:
            assert (handle.wait() == 40_000).all()
        large = np.full((300_000, 2), 40_000, np.float16)
        alone = ronde.allreduce(large, "large", ronde.Sum, postscale_factor=1 / size)
        assert (alone == 40_000).all()
        assert (large == 40_000).all()
        share = ronde.reducescatter(large, "share", ronde.Sum, postscale_factor=1 / size)
        assert (share == 40_000).all()
    # One factor, one rounding: 3 x 0.1 x 0.7 in float32.
    x = np.full(33, 3 * (ronde.rank() + 1), np.float16)
    total = sum(np.float32(3 * (rank + 1)) * np.float32(0.1) for rank in range(size))
    got = ronde.allreduce(x, "factors", ronde.Sum, prescale_factor=0.1, postscale_factor=0.7)
    assert (got == np.float16(total * np.float32(0.7))).all()
    ronde.shutdown()


def average_integers() -> None:
    """No sum wraps around, and the quotient is cut off towards zero, by the communicator and by name."""
    ronde.init()
    world: Any = ronde.world()
    for dtype in ("uint8", "int8", "int32", "int64", "uint64"):
        limits = np.iinfo(dtype)
        high = np.full(20_000, limits.max - 1, dtype)
        below = np.full(5, -1 if world.rank == 0 and limits.min < 0 else 0, dtype)
        for x, expected in ((high, high), (high[:7], high[:7]), (below, np.zeros(5, dtype))):
            assert (world.allreduce(x, op=ronde.Average) == expected).all(), dtype
            assert (world.reducescatter(x, op=ronde.Average) == expected[0]).all(), dtype
            reduced = world.reduce(x, 1, op=ronde.Average)
            assert reduced is None or (reduced == expected).all(), dtype
            assert (ronde.allreduce(x) == expected).all()
    ronde.shutdown()


def scale_integers() -> None:
    """Products with factors are exact, and wrap around as sums do; what cannot be exact is refused."""
    ronde.init()
    size = ronde.size()
    large = np.array([2**60 + 1, -(2**60) - 1, 3, -3])
    half = np.array([2**62, 2**59 + 1, 7, -7])
    wrap = np.array([100, -100, 1], np.int8) if ronde.rank() == 0 else np.array([-100, 100, 0], np.int8)
    for reduce in (
        ronde.allreduce,
        ronde.allreduce,
        lambda x, *named, **how: ronde.grouped_allreduce([x], *named, **how)[0],
    ):
        assert reduce(large, "post", op=ronde.Max, postscale_factor=2.0).tolist() == (2 * large).tolist()
        assert reduce(half, "fraction", op=ronde.Min, postscale_factor=0.5).tolist() == [2**61, 2**58, 3, -3]
        # A product that exceeds the type, and a sum that brings it back.
        sums = reduce(wrap, "pre", op=ronde.Sum, prescale_factor=2.0)
        assert sums.tolist() == (200 * np.array([2 - size, size - 2, 0]) + [0, 0, 2]).astype(np.int8).tolist()
        share = ronde.reducescatter(np.full(size, 2**60 + 1), "share", op=ronde.Max, prescale_factor=4)
        assert share.tolist() == [2**62 + 4]
        for factor in (np.inf, np.nan):
            with pytest.raises(
                ronde.UsageError, match=f"int64 values cannot be multiplied by .*={factor} .* are finite"
            ):
                ronde.allreduce(large, "post", op=ronde.Max, prescale_factor=factor)
    ronde.shutdown()


def reduce_zeros() -> None:
    """Zeros of either sign: the result does not depend on the element's place, nor on fusion."""
    ronde.init()
    world: Any = ronde.world()
    for dtype in (*DTYPES, np.dtype(np.float32), np.dtype(np.float64)):
        for count in COUNTS[:3]:
            signs = np.random.default_rng(count).integers(2, size=(world.size, count)) == 1
            x = np.where(signs[world.rank], -0.0, 0.0).astype(dtype)
            for op, expected in ((ronde.Max, signs.all(0)), (ronde.Min, signs.any(0))):
                parts = np.array_split(expected, world.size)
                everywhere = {
                    "allreduce": (world.allreduce(x, op=op), expected),
                    "reducescatter": (world.reducescatter(x, op=op), parts[world.rank]),
                    "by name": (ronde.allreduce(x, op=op), expected),
                    "fused": (ronde.grouped_allreduce([x[:7], x, x[7:]], op=op)[1], expected),
                }
                for name, (result, negative) in everywhere.items():
                    assert (np.signbit(result) == negative).all(), (name, dtype, count, op)
    ronde.shutdown()


def on_hosts(hosts: str, **environ: str) -> list[ranks.Place]:
    return [ranks.Place(environ={"RONDE_HOST_ID": host, **environ}) for host in hosts]


TOPOLOGIES = {
    "one host": ("aaa", "auto", True),
    "direct between hosts": ("abc", "direct", True),
    "doubling between hosts": ("abc", "doubling", False),
    "ring between hosts": ("abc", "ring", False),
    "hosts of two": ("aabb", "auto", False),
    "uneven hosts": ("aabbb", "hierarchical", False),
    "direct among hosts of two": ("abab", "direct", False),
    "ring on one host": ("aaa", "ring", False),
}
QUICK = ("one host", "direct between hosts", "uneven hosts")


@pytest.mark.parametrize(
    "topology",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOPOLOGIES],
)
def test_sums_of_16_bit_floats_are_rounded_once(topology: str) -> None:
    hosts, algorithm, is_ordered = TOPOLOGIES[topology]
    places = on_hosts(hosts, RONDE_ALLREDUCE_ALGORITHM=algorithm)
    with ranks.start(reduce_everywhere, len(hosts), is_ordered, places=places) as job:
        job.results()


@pytest.mark.parametrize(
    "topology",
    [
        name if name in (*QUICK, "ring between hosts") else pytest.param(name, marks=pytest.mark.slow)
        for name in TOPOLOGIES
    ],
)
def test_signs_of_zeros_do_not_depend_on_the_place(topology: str) -> None:
    hosts, algorithm, _ = TOPOLOGIES[topology]
    places = on_hosts(hosts, RONDE_ALLREDUCE_ALGORITHM=algorithm)
    with ranks.start(reduce_zeros, len(hosts), places=places) as job:
        job.results()


@pytest.mark.parametrize("hosts", [pytest.param("aaaa", marks=pytest.mark.slow), "aabb", "abcd"])
def test_averages_and_scaled_sums_by_name_do_not_overflow(hosts: str) -> None:
    with ranks.start(average_large_values, len(hosts), places=on_hosts(hosts)) as job:
        job.results()


@pytest.mark.parametrize("hosts", ["aaa", pytest.param("aab", marks=pytest.mark.slow)])
def test_factors_of_integers_are_exact(hosts: str) -> None:
    with ranks.start(scale_integers, len(hosts), places=on_hosts(hosts)) as job:
        job.results()


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_averages_of_integers_neither_wrap_nor_round_down(hosts: str) -> None:
    with ranks.start(average_integers, len(hosts), places=on_hosts(hosts)) as job:
        job.results()
