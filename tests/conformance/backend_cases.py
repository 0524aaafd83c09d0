"""What every backend must do, as a program for ranks: each case runs on all of them, in this order.

python -c 'from tests.conformance.backend_cases import main; main("FOLDER")'      # as a rank, under some launcher
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks.arithmetic import (
    COMPLEX,
    DTYPES,
    INTEGERS,
    UFUNCS,
    Array,
    dtype_of,
    reduced,
    supports,
    values,
)

import ronde
from ronde.engine import engine
from ronde.errors import MismatchError, PeerLostError, UsageError

CASES: dict[str, Callable[[], None]] = {}
SHAPE = (7, 3)
SEED = 20


def case(check: Callable[[], None]) -> Callable[[], None]:
    CASES[check.__name__.replace("_", " ")] = check
    return check


def everyones(dtype: str, shape: tuple[int, ...], op: Any = None, seed: int = SEED) -> list[Array]:
    """What each rank passes."""
    return [values(dtype, shape, seed, rank, op) for rank in range(ronde.size())]


def same(got: Any, expected: Array) -> None:
    result = np.asarray(got)
    assert result.dtype == expected.dtype
    if result.dtype == dtype_of("bfloat16"):  # NumPy does not know its NaNs
        result, expected = result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(result, expected, strict=True)


def check_reductions(dtype: str) -> None:
    """Every reduction: negotiated, cached, in place; and its shares."""
    rank, size = ronde.rank(), ronde.size()
    for op in UFUNCS:
        if not supports(dtype, op):
            continue
        given = everyones(dtype, SHAPE, op)
        with np.errstate(invalid="ignore"):
            expected, mine = reduced(given, op), given[rank]
        for _ in range(2):
            same(ronde.allreduce(mine, name=f"{dtype} {op}", op=op), expected)
        place = mine.copy()
        assert ronde.allreduce(place, name=f"{dtype} {op} in place", op=op, out=place) is place
        same(place, expected)
        share = ronde.reducescatter(mine, name=f"{dtype} {op} shares", op=op)
        same(share, np.array_split(expected, size)[rank])


@case
def reductions_of_bool() -> None:
    check_reductions("bool")


@case
def reductions_of_integers() -> None:
    for dtype in INTEGERS:
        check_reductions(dtype)


@case
def reductions_of_16_bit_floats() -> None:
    check_reductions("float16")
    check_reductions("bfloat16")


@case
def reductions_of_floats() -> None:
    check_reductions("float32")
    check_reductions("float64")


@case
def reductions_of_complex_numbers() -> None:
    for dtype in COMPLEX:
        check_reductions(dtype)


@case
def sums_of_16_bit_floats_are_rounded_once() -> None:
    """The sum of 1 and many numbers too small to change it by themselves."""
    tiny = 2.0**-11
    for dtype, unit in (("float16", 1.0), ("bfloat16", 16.0)):
        x = np.full(33, unit if ronde.rank() == 0 else unit * tiny, dtype_of(dtype))
        wide = unit + (ronde.size() - 1) * unit * tiny
        expected = np.full(33, wide, np.float32).astype(dtype_of(dtype))
        same(ronde.allreduce(x, name=f"tiny {dtype}", op=ronde.Sum), expected)


@case
def averages_of_integers_do_not_wrap_and_are_cut_off_towards_zero() -> None:
    rank, size = ronde.rank(), ronde.size()
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        limits = np.iinfo(dtype)
        everyones = [[limits.max, limits.max - r, limits.min, limits.min + r, r, 3 * r] for r in range(size)]
        if limits.min < 0:
            for r, numbers in enumerate(everyones):
                numbers += [-r, -3 * r - 1, -1 if r == 0 else 0]
        totals = [sum(column) for column in zip(*everyones)]
        expected = np.array([abs(total) // size * (1 if total >= 0 else -1) for total in totals], dtype)
        x = np.array(everyones[rank], dtype)
        same(ronde.allreduce(x, name=f"average {dtype}"), expected)
        same(
            ronde.reducescatter(x, name=f"shares of {dtype}", op=ronde.Average),
            np.array_split(expected, size)[rank],
        )


@case
def factors_before_and_after() -> None:
    size, total = ronde.size(), sum(range(ronde.size()))
    for dtype in ("float16", "float32", "float64"):
        x = np.full(9, ronde.rank(), dtype_of(dtype))
        for op, factor in ((ronde.Sum, 1.0), (ronde.Average, 1.0 / size), (ronde.Max, (size - 1) / total)):
            got = ronde.allreduce(
                x, name=f"scaled {dtype} {op}", op=op, prescale_factor=2.0, postscale_factor=0.25
            )
            np.testing.assert_allclose(got, np.full(9, total * 0.5 * factor), rtol=1e-3)
            assert (x == ronde.rank()).all()
        share = ronde.reducescatter(x, name=f"scaled shares {dtype}", op=ronde.Sum, prescale_factor=0.5)
        np.testing.assert_allclose(share, np.full(share.shape, total * 0.5), rtol=1e-3)


@case
def gathering_rows() -> None:
    rank, size = ronde.rank(), ronde.size()
    for dtype in DTYPES:
        given = [values(dtype, (r + 1, 2), SEED, r) for r in range(size)]
        for _ in range(2):
            same(ronde.allgather(given[rank], name=f"uneven {dtype}"), np.concatenate(given))
        given = everyones(dtype, (3,))
        same(ronde.allgather(given[rank], name=f"even {dtype}"), np.concatenate(given))
    mine = np.full((0 if rank == 0 else 2, 3), rank)
    same(
        ronde.allgather(mine, name="none on one"), np.repeat(np.arange(1, size), 2)[:, None].repeat(3, axis=1)
    )
    same(ronde.allgather(np.array(rank), name="0-d"), np.arange(size))


@case
def broadcasting() -> None:
    for dtype in DTYPES:
        for root in {0, ronde.size() - 1}:
            given = everyones(dtype, (5, 2))
            same(ronde.broadcast(given[ronde.rank()], root, name=f"{dtype} from {root}"), given[root])
    place = np.full(4, float(ronde.rank()))
    for _ in range(2):
        assert ronde.broadcast(place, 1, name="broadcast in place", out=place) is place
        assert (place == 1).all()


@case
def dealing_rows() -> None:
    rank, size = ronde.rank(), ronde.size()
    for dtype in DTYPES:
        given = everyones(dtype, (2 * size, 3))
        expected = np.concatenate([x[2 * rank : 2 * rank + 2] for x in given])
        for _ in range(2):
            same(ronde.alltoall(given[rank], name=f"even deal {dtype}"), expected)
    splits = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    given = [np.full((sum(splits[r]), 2), r, np.int16) for r in range(size)]
    for _ in range(2):
        handle = ronde.alltoall_async(given[rank], splits[rank], name="uneven deal")
        received = [splits[sender][rank] for sender in range(size)]
        same(handle.wait(), np.repeat(np.arange(size, dtype=np.int16), received)[:, None].repeat(2, axis=1))
        assert handle.received_splits == received
    mine = np.arange(3.0) if rank == 0 else np.zeros(0)
    everything = [3 if rank == 0 and r == size - 1 else 0 for r in range(size)]
    got = ronde.alltoall(mine, everything, name="one message")
    same(got, np.arange(3.0) if rank == size - 1 else np.zeros(0))


@case
def nothing_at_all() -> None:
    for shape in ((0,), (0, 3), (3, 0)):
        x = np.zeros(shape)
        assert ronde.allreduce(x, name=f"no sum {shape}").shape == shape
        assert ronde.allreduce(x, name=f"no most {shape}", op=ronde.Max).shape == shape
        assert ronde.broadcast(x, 0, name=f"no broadcast {shape}").shape == shape
        rows = ronde.allgather(x, name=f"no rows {shape}").shape
        assert rows == (shape[0] * ronde.size(), *shape[1:])
        assert ronde.reducescatter(x, name=f"no shares {shape}").shape[1:] == shape[1:]
    assert ronde.alltoall(np.zeros((0, 2)), name="no deal").shape == (0, 2)
    one = np.array([[1.0 + ronde.rank(), 2.0]])  # fewer rows than ranks
    share = ronde.reducescatter(one, name="one row", op=ronde.Sum)
    assert share.shape == (1 if ronde.rank() == 0 else 0, 2)


@case
def many_at_once() -> None:
    """Bursts that are fused, of several types, from two threads, in another order on every rank."""
    rank, size = ronde.rank(), ronde.size()

    def work(tag: str, dtype: str) -> None:
        for burst in range(3):
            order = np.random.default_rng([rank, burst]).permutation(40)
            handles = {
                i: ronde.allreduce_async(
                    np.full(10 * i + 1, i + rank, dtype), name=f"{tag} {i}", op=ronde.Sum
                )
                for i in order.tolist()
            }
            for i, handle in handles.items():
                same(handle.wait(), np.full(10 * i + 1, i * size + sum(range(size)), dtype))

    threads = [threading.Thread(target=work, args=(f"burst {d}", d)) for d in ("float32", "int64")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@case
def large_ones() -> None:
    rank, size = ronde.rank(), ronde.size()
    x = np.arange(800_003, dtype=np.float32) % 1000 + rank
    same(ronde.allreduce(x, name="large", op=ronde.Sum), (x - rank) * size + sum(range(size)))
    same(ronde.broadcast(x, size - 1, name="large broadcast"), x - rank + size - 1)
    same(ronde.allgather(x, name="large rows"), np.concatenate([x - rank + r for r in range(size)]))


@case
def barriers() -> None:
    for turn in range(2):
        time.sleep(0.02 * ((ronde.rank() + turn) % ronde.size()))
        ronde.barrier()
        ronde.barrier(name="with a name")


@case
def disagreements() -> None:
    """They are found before the backend is asked; the next operation works."""
    last = ronde.rank() == ronde.size() - 1
    for _ in range(2):
        with pytest.raises(MismatchError, match="tensor 'apart'"):
            ronde.allreduce(np.ones(4 if last else 3), name="apart")
        assert (ronde.allreduce(np.ones(3), name="after", op=ronde.Sum) == ronde.size()).all()
        with pytest.raises(UsageError):
            ronde.broadcast(np.ones(3), ronde.size(), name="from nobody")


@case
def to_leave_and_to_join_again() -> None:
    before = engine().backends()
    ronde.shutdown()
    ronde.init()
    assert engine().backends() == before
    assert (ronde.allreduce(np.ones(3), name="again", op=ronde.Sum) == ronde.size()).all()


def run_all() -> tuple[list[str], dict[str, str]]:
    """Return the backends in use beside the native one, and what went wrong in each case (nothing: empty)."""
    backends = engine().backends()
    outcomes = {}
    for name, check in CASES.items():
        try:
            check()
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    ronde.shutdown()
    return backends, outcomes


def work_for_ever(x: Array) -> None:
    while True:
        for handle in [ronde.allreduce_async(x, name=f"work {i}") for i in range(4)]:
            handle.wait()
        ronde.allgather(x[:1000], name="more work")


def lose_one(folder: str) -> None:
    """The last rank dies in the middle of much work; what the others raise is left in a file of each."""
    ronde.init()
    rank, victim = ronde.rank(), ronde.size() - 1
    x = np.ones(2_000_000, np.float32)
    ronde.allreduce(x, name="before")
    if rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(PeerLostError) as caught:
        work_for_ever(x)
    with pytest.raises(PeerLostError):
        ronde.allreduce(x, name="after")
    ronde.shutdown()
    leave(folder, rank, [caught.value.rank, str(caught.value)])


def pass_all(folder: str) -> None:
    """Run every case, and leave in a file what came of it."""
    ronde.init()
    rank = ronde.rank()
    leave(folder, rank, run_all())


def leave(folder: str, rank: int, answer: Any) -> None:
    """Write a file at once, for somebody who counts them."""
    unfinished = Path(folder).parent / f"{rank}"
    unfinished.write_text(json.dumps(answer))
    unfinished.rename(Path(folder) / f"{rank}")
