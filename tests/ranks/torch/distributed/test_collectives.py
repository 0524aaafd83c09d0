"""Collectives of the backend "ronde": each dtype, reduction and form, synchronous and asynchronous, by formulas.

The values are small integers, so that all dtypes hold the results exactly, in any order of the sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.torch.distributed.groups import default_group, same

from ronde.errors import UsageError
from ronde.testing import ranks

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
Op: Any = dist.ReduceOp


def values(rank: int, dtype: Any, count: int = 6) -> Any:
    numbers = (torch.arange(count) * 5 + rank * 3) % 4 + 1
    if dtype == torch.bool:
        return (numbers + rank) % 3 == 0
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double() - 2).to(dtype)
    return numbers.to(dtype)


def each_way(call: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Make the call, once as it is and once asynchronously. It must write the same results again."""
    assert call(*args, **how) is None
    work = call(*args, **how, async_op=True)
    work.wait()
    assert work.is_completed()


def reductions_of(dtype: Any) -> dict[Any, Callable[[Any], Any]]:
    """Return what all ranks' values, stacked, become by each reduction that the dtype has."""
    found: dict[Any, Callable[[Any], Any]] = {
        Op.SUM: lambda stack: stack.any(0) if dtype == torch.bool else stack.sum(0).to(dtype),
    }
    if not dtype.is_complex:  # for which PyTorch allows no other reduction
        found |= {
            Op.PRODUCT: lambda stack: stack.all(0) if dtype == torch.bool else stack.prod(0).to(dtype),
            Op.MIN: lambda stack: stack.amin(0),
            Op.MAX: lambda stack: stack.amax(0),
        }
    if dtype in FLOATS + COMPLEX:
        found[Op.AVG] = lambda stack: (stack * 2).sum(0).to(dtype) / (2 * len(stack))
        found[dist._make_nccl_premul_sum(0.5)] = lambda stack: (stack * 0.5).sum(0)
    if dtype in (torch.bool, *INTEGERS):
        found |= {
            Op.BAND: partial(functools.reduce, torch.bitwise_and),
            Op.BOR: partial(functools.reduce, torch.bitwise_or),
            Op.BXOR: partial(functools.reduce, torch.bitwise_xor),
        }
    return found


def reduced(rank: int, size: int) -> None:
    for dtype in DTYPES:
        for op, formula in reductions_of(dtype).items():
            given = values(rank, dtype, 3 * size)
            expected = formula(torch.stack([values(each, dtype, 3 * size) for each in range(size)]))
            if size == 3 and op == Op.AVG:
                expected = None  # thirds: their rounding is the subject of tests/ranks/communicator
            check_reduction(rank, size, op, given, expected)


def check_reduction(rank: int, size: int, op: Any, given: Any, expected: Any) -> None:
    def agrees(result: Any, wanted: Any) -> None:
        if expected is not None:
            same(result, wanted)

    part = slice(3 * rank, 3 * rank + 3)
    mine = None if expected is None else expected[part]
    result = given.clone()
    dist.all_reduce(result, op)
    agrees(result, expected)
    result = given.clone()
    work = dist.all_reduce(result, op, async_op=True)
    work.wait()
    agrees(result, expected)
    if not result.dtype.is_complex:  # PyTorch passes a view with pairs of real numbers
        same(work.result()[0], result)
    several = [given.clone(), given.clone()[:2]]
    dist.all_reduce_coalesced(several, op)
    agrees(several[0], expected)
    agrees(several[1], None if expected is None else expected[:2])
    for root in range(size):
        result = given.clone()
        dist.reduce(result, root, op)
        if rank == root:
            agrees(result, expected)
    output = torch.empty_like(given[:3])
    each_way(dist.reduce_scatter_tensor, output, given, op)
    agrees(output, mine)
    each_way(dist.reduce_scatter, output, [each.clone() for each in given.chunk(size)], op)
    agrees(output, mine)


def moved(rank: int, size: int) -> None:
    for dtype in DTYPES:
        every = [values(each, dtype) for each in range(size)]
        given = every[rank].clone()
        for root in range(size):
            result = given.clone()
            each_way(dist.broadcast, result, root)
            same(result, every[root])
            parts = [torch.empty_like(given) for _ in range(size)] if rank == root else None
            each_way(dist.gather, given, parts, root)
            same(parts or [], every if rank == root else [])
            result = torch.empty_like(given)
            each_way(dist.scatter, result, every if rank == root else None, root)
            same(result, given)
        parts = [torch.empty_like(given) for _ in range(size)]
        each_way(dist.all_gather, parts, given)
        same(parts, every)
        flat = torch.empty(6 * size, dtype=dtype)
        each_way(dist.all_gather_into_tensor, flat, given)
        same(flat, torch.cat(every))
        stacked = torch.empty(size, 6, dtype=dtype)
        dist.all_gather_into_tensor(stacked, given)
        same(stacked, torch.stack(every))
        exchanged(rank, size, dtype)
        dist.barrier()
    work = dist.barrier(async_op=True)
    assert work.wait()


def exchanged(rank: int, size: int, dtype: Any) -> None:
    blocks = [[values(10 * one + other, dtype, 2) for other in range(size)] for one in range(size)]
    output = torch.empty(2 * size, dtype=dtype)
    each_way(dist.all_to_all_single, output, torch.cat(blocks[rank]))
    same(output, torch.cat([of_rank[rank] for of_rank in blocks]))
    outputs = [torch.empty(2, dtype=dtype) for _ in range(size)]
    each_way(dist.all_to_all, outputs, [each.clone() for each in blocks[rank]])
    same(outputs, [of_rank[rank] for of_rank in blocks])


def uneven(rank: int, size: int) -> None:
    """Parts of 0, 1, 2 ... rows, and rows of several elements."""
    every = [values(each, torch.float32, 3 * each).view(-1, 3) for each in range(size)]
    parts = [torch.empty_like(each) for each in every]
    each_way(dist.all_gather, parts, every[rank])
    same(parts, every)
    output = torch.empty_like(every[rank])
    each_way(dist.reduce_scatter, output, [each.clone() for each in every])
    same(output, size * every[rank])
    # Rank i sends i + j rows to rank j.
    given = [torch.full((rank + other, 2), 10.0 * rank + other) for other in range(size)]
    expected = [torch.full((rank + other, 2), 10.0 * other + rank) for other in range(size)]
    counts = [rank + other for other in range(size)]
    rows = torch.empty(sum(counts), 2)
    each_way(dist.all_to_all_single, rows, torch.cat(given), counts, counts)
    same(rows, torch.cat(expected))
    outputs = [torch.empty_like(each) for each in expected]
    each_way(dist.all_to_all, outputs, given)
    same(outputs, expected)


def shapes(rank: int, size: int) -> None:
    """Tensors without elements, without axes, and with gaps in memory, as input and as output."""
    total = size * (size + 1) / 2
    for shape in ((0,), (), (0, 3), (3, 4)):
        result = torch.full(shape, rank + 1.0)
        each_way(dist.all_reduce, result)
        same(result, torch.full(shape, total * size))
        parts = [torch.empty(shape) for _ in range(size)]
        each_way(dist.all_gather, parts, torch.full(shape, float(rank)))
        same(parts, [torch.full(shape, float(each)) for each in range(size)])
    grid = torch.arange(12.0).view(3, 4)
    views: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:3],
        lambda x: x[:, :1].expand(3, 1),
    )
    for view in views:
        result = view(grid + rank).detach()
        each_way(dist.all_reduce, result)
        factor = (size * grid + sum(range(size))) * size
        same(result, view(factor))
        strided = view(torch.zeros(3, 4))
        each_way(dist.broadcast, strided if rank else view(grid), 0)
        if rank:
            same(strided, view(grid))
        parts = [view(torch.zeros(3, 4)) for _ in range(size)]
        each_way(dist.all_gather, parts, view(grid + rank))
        same(parts, [view(grid + each) for each in range(size)])
    channels = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last) + rank
    dist.all_reduce(channels)
    same(channels, torch.arange(16.0).view(1, 2, 2, 4) * size + sum(range(size)))
    untouched = torch.zeros(4, 4)
    dist.all_reduce(untouched[1:3, 1:3].add_(1.0))
    assert untouched.sum() == 4 * size


def coalesced(rank: int, size: int) -> None:
    given = [torch.full((4,), rank + 1.0), torch.full((2, 3), rank + 2.0)]
    expected = [
        torch.full((4,), size * (size + 1) / 2),
        torch.full((2, 3), float(sum(range(2, size + 2)))),
    ]
    for is_async in (False, True):
        several = [each.clone() for each in given]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for each in several:
                dist.all_reduce(each)
        if is_async:
            manager.wait()
        same(several, expected)
        outputs = [torch.empty(size * 4), torch.empty(size * 2, 3)]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for output, each in zip(outputs, given):
                dist.all_gather_into_tensor(output, each)
        if is_async:
            manager.wait()
        same(outputs[0], torch.cat([torch.full((4,), each + 1.0) for each in range(size)]))
        parts = [torch.empty(4), torch.empty(2, 3)]
        inputs = [each.repeat(size, *[1] * (each.dim() - 1)) for each in given]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for part, each in zip(parts, inputs):
                dist.reduce_scatter_tensor(part, each)
        if is_async:
            manager.wait()
        same(parts, expected)
    lists = [[torch.empty_like(each) for each in given] for _ in range(size)]
    dist.all_gather_coalesced(lists, given)
    same(lists[-1], [torch.full((4,), float(size)), torch.full((2, 3), size + 1.0)])


def in_flight(rank: int, size: int) -> None:
    """Many operations at once, waited for in another order, with futures and without anybody who waits."""
    many = [torch.full((100 * each,), float(rank + each)) for each in range(50)]
    works = [dist.all_reduce(each, async_op=True) for each in many]
    futures = [work.get_future() for work in works[::7]]
    for future, each in zip(futures, range(0, 50, 7)):
        same(future.wait()[0], torch.full((100 * each,), float(size * each + sum(range(size)))))
    for work in reversed(works):
        work.wait()
    for each, result in enumerate(many):
        same(result, torch.full((100 * each,), float(size * each + sum(range(size)))))
    dist.all_reduce(torch.ones(1000), async_op=True)  # dropped at once
    chained = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda it: it.value()[0] + 1)
    same(chained.wait(), torch.full((3,), size + 1.0))


def objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "text": "x" * (10 * rank)}
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine)
    assert [each["rank"] for each in every] == list(range(size))
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert rank != 1 or gathered == every
    told = [mine, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    assert told == [every[0], 0]
    own: list[Any] = [None]
    dist.scatter_object_list(own, every if rank == 0 else None, src=0)
    assert own == [mine]
    if rank == 0:
        dist.send_object_list([mine, "end"], dst=1)
    elif rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == [every[0], "end"]


def refused(rank: int, size: int) -> None:
    """Errors that every rank raises by itself. The next operation works."""
    x = torch.ones(4)
    with pytest.raises(UsageError, match="complex"):
        dist.reduce_scatter_tensor(x[:1].cfloat(), x[:1].cfloat().repeat(size), Op.MAX)
    with pytest.raises(UsageError):
        dist.all_reduce(x, Op.BAND)
    with pytest.raises(UsageError, match="float8"):
        dist.all_reduce(x.to(torch.float8_e4m3fn))
    with pytest.raises(UsageError, match="sparse"):
        dist.all_reduce(x.to_sparse(), Op.MAX)
    with pytest.raises(UsageError, match="the output must have"):
        dist.all_gather_into_tensor(torch.empty(4 * size + 1), x)
    with pytest.raises(UsageError, match=r"the output is torch\.int32"):
        dist.all_gather_into_tensor(torch.empty(4 * size, dtype=torch.int32), x)
    with pytest.raises(UsageError, match="the input must have"):
        dist.reduce_scatter_tensor(x, torch.empty(4 * size + 1))
    with pytest.raises(UsageError, match="one tensor for each"):
        dist.all_gather([x], x)
    with pytest.raises(UsageError, match="the output tensor for this rank has 12"):
        dist.all_gather([torch.empty(3)] * size, x)
    with pytest.raises(UsageError, match="share evenly"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size + 1))
    with pytest.raises(UsageError, match="input_split_sizes"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size)
    with pytest.raises((UsageError, ValueError)):
        dist.broadcast(x, size)
    with pytest.raises((UsageError, ValueError)):
        dist.send(x, size)
    with pytest.raises(UsageError, match="a tag must be"):
        dist.send(x, 1 - rank if rank < 2 else 0, tag=-1)
    eights = [torch.empty(4, dtype=torch.float8_e4m3fn) for _ in range(size)]
    dist.all_gather(eights, x.to(torch.float8_e4m3fn))  # moving needs no arithmetic
    assert all((each.float() == 1).all() for each in eights)
    dist.all_reduce(x)
    same(x, torch.full((4,), float(size)))


CHECKS = (reduced, moved, uneven, shapes, coalesced, in_flight, objects, refused)


def collectives(folder: str) -> None:
    with default_group(folder) as (rank, size):
        for check in CHECKS:
            check(rank, size)
            dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int, tmp_path: Path) -> None:
    if size == 1:
        ranks.run(alone, 1, str(tmp_path))
    else:
        ranks.run(collectives, size, str(tmp_path))


def alone(folder: str) -> None:
    """A group of one rank."""
    with default_group(folder) as (rank, size):
        for check in (reduced, moved, uneven, shapes, coalesced, in_flight):
            check(rank, size)


def test_collectives_by_tcp(tmp_path: Path) -> None:
    ranks.run(collectives, 2, str(tmp_path), environ={"RONDE_TRANSPORT": "tcp"})
