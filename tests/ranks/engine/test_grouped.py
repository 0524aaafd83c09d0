"""Groups: several arrays under one name, which run together or not at all."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ronde
from ronde.errors import MismatchError
from ronde.testing import ranks

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
SIZES = pytest.mark.parametrize("n", [1, 2, 3, 4])


def arrays(rank: int) -> list[Any]:
    """Of different types, shapes and sizes: some are fused, some too large for it."""
    return [
        np.full((3, 2), rank + 1, np.float32),
        np.full((), rank + 1, np.int64),
        np.full((0, 4), rank, np.float32),
        np.full((70_000,), rank + 1, np.float64),
        np.full((7,), rank + 1, ml_dtypes.bfloat16),
        np.full((5,), rank + 1, np.float32),
    ]


def do_grouped_operations(rounds: int) -> None:
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    total = size * (size + 1) // 2
    mine = arrays(rank)
    rows = [np.full((rank + index, 2), rank, np.int32) for index in range(4)]
    uneven = [
        np.arange((size + 1) * 2.0).reshape(-1, 2) * (rank + 1),
        np.full((2 * size, 3), rank + 1, np.float64),
    ]
    for _ in range(rounds):
        for given, result in zip(mine, ronde.grouped_allreduce(mine, name="sums", op=ronde.Sum)):
            assert result.dtype == given.dtype
            assert result.shape == given.shape
            assert (result == total).all()
        gathering = ronde.grouped_allgather_async(rows, name="rows")
        scattering = ronde.grouped_reducescatter_async(uneven, op=ronde.Sum)
        places = [np.empty_like(each) for each in mine]
        outs = ronde.grouped_allreduce(mine, outs=places, op=ronde.Max)
        assert all(out is place for out, place in zip(outs, places))
        assert all((place == size).all() for place in places)
        for index, result in enumerate(gathering.wait()):
            expected = np.concatenate([np.full((each + index, 2), each, np.int32) for each in range(size)])
            assert result.tolist() == expected.tolist()
        for given, result in zip(uneven, scattering.wait()):
            whole = given / (rank + 1) * total
            assert result.tolist() == np.array_split(whole, size)[rank].tolist()
        assert ronde.grouped_allreduce([]) == []
        [alone] = ronde.grouped_allreduce([np.ones(3)], name="alone")
        assert alone.tolist() == [1, 1, 1]
    ronde.shutdown()


@SIZES
@ON_BOTH
def test_grouped_operations(n: int, transport: str) -> None:
    ranks.run(do_grouped_operations, n, 6, environ={"RONDE_TRANSPORT": transport})


@pytest.mark.parametrize("environ", [{"RONDE_DISABLE_GROUP_FUSION": "1"}, {"RONDE_CACHE_CAPACITY": "1"}])
def test_under_other_settings(environ: dict[str, str]) -> None:
    ranks.run(do_grouped_operations, 2, 4, environ=environ)


def fuse_small_ones(count: int) -> None:
    """All-gathers and reduce-scatters that come in a burst."""
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    for _ in range(5):
        gathering = [
            ronde.allgather_async(
                np.full(index % 3 + rank, index, np.int16 if index % 2 else np.float64), name=f"g{index}"
            )
            for index in range(count)
        ]
        scattering = [
            ronde.reducescatter_async(
                np.full((index + 1, 2), index + rank, np.float32), name=f"s{index}", op=ronde.Sum
            )
            for index in range(count)
        ]
        for index, handle in enumerate(gathering):
            assert handle.wait().tolist() == [index] * sum(index % 3 + each for each in range(size))
        for index, scattered in enumerate(scattering):
            rows = len(np.array_split(np.empty(index + 1), size)[rank])
            assert scattered.wait().tolist() == [[index * size + size * (size - 1) // 2] * 2] * rows
    ronde.shutdown()


@ON_BOTH
def test_gathers_and_scatters_that_are_fused(transport: str) -> None:
    ranks.run(fuse_small_ones, 3, 30, environ={"RONDE_TRANSPORT": transport})


def disagree() -> list[str]:
    ronde.init()
    last = ronde.rank() == ronde.size() - 1
    ones = [np.ones(2, np.float32), np.ones(3, np.float32)]
    others: list[list[Any]] = [
        [np.ones(2, np.float32)],
        [np.ones(2, np.float32), np.ones(4, np.float32)],
        [np.ones(2, np.float64), np.ones(3, np.float32)],
    ]
    answers = []
    for other in others:
        for _ in range(2):  # also when it is cached
            with pytest.raises(MismatchError) as caught:
                ronde.grouped_allreduce(other if last else ones, name="group")
            answers.append(str(caught.value))
            assert ronde.grouped_allreduce(ones, name="group")[1].tolist() == [1, 1, 1]
    ronde.shutdown()
    return answers


@pytest.mark.parametrize("n", [2, 3])
def test_groups_that_differ(n: int) -> None:
    first, *others = ranks.run(disagree, n)
    assert all(answers == first for answers in others)
    last = n - 1
    assert first[0] == f"group 'group': rank 0 submitted allreduce of 2 tensors, but rank {last} of 1"
    assert first[2].endswith(f"with shape (3,), but rank {last} with shape (4,) (tensor 1 of the group)")
    assert first[4].endswith(
        f"with dtype float32, but rank {last} with dtype float64 (tensor 0 of the group)"
    )
