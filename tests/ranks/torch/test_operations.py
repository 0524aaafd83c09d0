"""`ronde.torch`: every operation in every form, on 1, 2 and 3 ranks, against the same computed without Ronde."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def same(result: Any, expected: Any) -> None:
    """The same tensor in values, type and shape; nothing that autograd would follow."""
    assert isinstance(result, torch.Tensor), type(result)
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert not result.requires_grad
    assert torch.equal(result, expected), (result, expected)


def numbers(rank: int, dtype: str = "float32", rows: int = 6) -> Any:
    """A tensor of small numbers, different on each rank: [rows, 3]."""
    return (torch.arange(3 * rows).reshape(rows, 3) % 5 + rank).to(getattr(torch, dtype))


def of_all(size: int, **how: Any) -> list[Any]:
    return [numbers(rank, **how) for rank in range(size)]


def share(x: Any, rank: int, size: int) -> Any:
    """The rank's rows, as `array_split` divides them."""
    return torch.tensor_split(x, size)[rank]


def queries(rank: int, size: int) -> None:
    assert (hvd.rank(), hvd.size()) == (ronde.rank(), ronde.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.gloo_built() == torch.distributed.is_gloo_available()
    assert hvd.cuda_built() == (hvd.nccl_built() > 0)
    assert not hvd.ddl_built()
    assert not hvd.rocm_built()
    for query in (hvd.mpi_enabled, hvd.gloo_enabled, hvd.mpi_threads_supported):
        assert not query()


def reductions(rank: int, size: int) -> None:
    for dtype in (*INTEGERS, *FLOATS):
        mine, everyone = numbers(rank, dtype), of_all(size, dtype=dtype)
        total = functools.reduce(operator.add, [x.to(torch.float64) for x in everyone])
        mean = total / size if dtype in FLOATS else (total / size).trunc()
        same(hvd.allreduce(mine), mean.to(mine.dtype))
        same(hvd.allreduce(mine, op=hvd.Average, name="mean"), mean.to(mine.dtype))
        same(hvd.allreduce(mine, op=hvd.Sum), total.to(mine.dtype))
        same(hvd.allreduce(mine, op=hvd.Min), everyone[0])
        same(hvd.allreduce(mine, op=hvd.Max), everyone[-1])
        same(hvd.allreduce(mine, op=hvd.Product), functools.reduce(operator.mul, everyone))
        same(mine, numbers(rank, dtype))
    same(
        hvd.allreduce(torch.tensor(3.0 + rank), op=hvd.Sum), torch.tensor(3.0 * size + size * (size - 1) / 2)
    )
    same(hvd.allreduce(torch.zeros(0, 3)), torch.zeros(0, 3))


def scale_factors(rank: int, size: int) -> None:
    x = numbers(rank)
    total = sum(of_all(size))
    same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), total * 0.5)
    same(hvd.allreduce(x, op=hvd.Sum, postscale_factor=4.0), total * 4)
    same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), total * 2)
    same(hvd.allreduce_(x.clone(), op=hvd.Sum, prescale_factor=2.0), total * 2)
    same(
        hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        share(total * 2, rank, size),
    )


def the_deprecated_argument(rank: int, size: int) -> None:
    x, total = numbers(rank), sum(of_all(size))
    with pytest.warns(DeprecationWarning, match="op=Average"):
        same(hvd.allreduce(x, average=False), total)
    with pytest.warns(DeprecationWarning, match="op=Average"):
        same(hvd.allreduce(x, True), total / size)
    for function in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="not both"):
            function(x, average=True, op=hvd.Sum)
    for function in (hvd.grouped_allreduce, hvd.grouped_allreduce_async_):
        with pytest.raises(ValueError, match="not both"):
            function([x], average=True, op=hvd.Sum)


def in_place(rank: int, size: int) -> None:
    total = sum(of_all(size))
    x = numbers(rank)
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    same(x, total)
    wide = torch.zeros(3, 12)
    view = wide[:, ::2].t()  # [6, 3], and nothing about it is contiguous
    view.copy_(numbers(rank))
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    same(view, total)
    assert (wide[:, 1::2] == 0).all()
    view.copy_(numbers(rank))
    assert hvd.synchronize(hvd.allreduce_async_(view, op=hvd.Sum)) is view
    same(view, total)
    weights = torch.nn.Parameter(numbers(rank))
    assert hvd.broadcast_(weights, root_rank=size - 1) is weights
    same(weights.data, numbers(size - 1))
    assert weights.is_leaf


def layouts(rank: int, size: int) -> None:
    base = [torch.arange(24.0).reshape(4, 6) + each for each in range(size)]
    turns: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1, 2],
        lambda x: x[:1].expand(3, 6),
    )
    for turn in turns:
        views = [turn(x) for x in base]
        same(hvd.allreduce(views[rank], op=hvd.Sum), sum(views))
        same(hvd.broadcast(views[rank], root_rank=size - 1), views[-1])
        same(hvd.allgather(views[rank]), torch.cat([x if x.dim() else x[None] for x in views]))


def asynchronous(rank: int, size: int) -> None:
    handles = {}
    for step in range(20):
        number = step if rank % 2 == 0 else 19 - step  # another order on every second rank
        handles[number] = hvd.allreduce_async(numbers(rank) + number, name=f"tensor {number}", op=hvd.Sum)
    for number, handle in handles.items():
        same(hvd.synchronize(handle), sum(of_all(size)) + size * number)
        assert hvd.poll(handle)
    handle = hvd.broadcast_async_(numbers(rank), 0)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), numbers(0))


def grouped(rank: int, size: int) -> None:
    def mine(rank: int) -> list[Any]:
        return [numbers(rank), numbers(rank, "int64"), torch.tensor(float(rank))]

    total = [sum(each) for each in zip(*[mine(other) for other in range(size)])]
    in_place = mine(rank)
    for results in (
        hvd.grouped_allreduce(mine(rank), op=hvd.Sum),
        hvd.grouped_allreduce(mine(rank), name="group", op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine(rank), op=hvd.Sum)),
        hvd.grouped_allreduce_(in_place, op=hvd.Sum),
        in_place,
    ):
        for result, expected in zip(results, total):
            same(result, expected)
    handle = hvd.grouped_allgather_async(mine(rank), name="gathered")
    joined = hvd.synchronize(handle)
    assert hvd.poll(handle)
    same(joined[0], torch.cat(of_all(size)))
    same(joined[2], torch.arange(float(size)))
    for result, expected in zip(hvd.grouped_allgather(mine(rank)), joined):
        same(result, expected)
    scattered = hvd.grouped_reducescatter(mine(rank)[:2], op=hvd.Sum)
    again = hvd.synchronize(hvd.grouped_reducescatter_async(mine(rank)[:2], op=hvd.Sum))
    for results in (scattered, again):
        same(results[0], share(total[0], rank, size))
        same(results[1], share(total[1], rank, size))
    assert hvd.grouped_allreduce([]) == []


def gathered(rank: int, size: int) -> None:
    uneven = [numbers(each, rows=each + 1) for each in range(size)]
    same(hvd.allgather(uneven[rank]), torch.cat(uneven))
    same(hvd.synchronize(hvd.allgather_async(uneven[rank], name="uneven")), torch.cat(uneven))
    empty = [numbers(each, rows=each) for each in range(size)]
    same(hvd.allgather(empty[rank]), torch.cat(empty))
    same(hvd.allgather(torch.tensor(rank)), torch.arange(size))


def broadcasts(rank: int, size: int) -> None:
    for root in range(size):
        x = numbers(rank)
        same(hvd.broadcast(x, root), numbers(root))
        same(hvd.broadcast(x, root_rank=root, name="named"), numbers(root))
        same(hvd.synchronize(hvd.broadcast_async(x, root)), numbers(root))
        same(x, numbers(rank))
        assert hvd.broadcast_(x, root) is x
        same(x, numbers(root))


def exchanged(rank: int, size: int) -> None:
    x = [numbers(each, rows=2 * size) for each in range(size)]
    even = torch.cat([each[2 * rank : 2 * rank + 2] for each in x])
    same(hvd.alltoall(x[rank]), even)
    output, received = hvd.synchronize(hvd.alltoall_async(x[rank]))
    same(output, even)
    same(received, torch.full((size,), 2, dtype=torch.int32))

    def splits(source: int) -> list[int]:
        return [source + destination for destination in range(size)]

    parts = [torch.split(numbers(each, rows=sum(splits(each))), splits(each)) for each in range(size)]
    mine, expected = torch.cat(parts[rank]), torch.cat([each[rank] for each in parts])
    counts = torch.tensor([source + rank for source in range(size)])
    for given in (splits(rank), torch.tensor(splits(rank)), torch.tensor(splits(rank), dtype=torch.int16)):
        output, received = hvd.alltoall(mine, splits=given)
        same(output, expected)
        same(received, counts.to(given.dtype if isinstance(given, torch.Tensor) else torch.int32))
    output, received = hvd.synchronize(hvd.alltoall_async(mine, splits(rank), name="exchange"))
    same(output, expected)
    with pytest.raises(ValueError, match="splits needs"):
        hvd.alltoall(mine, splits=[1] * (size + 1))


def scattered(rank: int, size: int) -> None:
    for rows in (6, 7, 1):
        x = [numbers(each, rows=rows) for each in range(size)]
        same(hvd.reducescatter(x[rank]), share(sum(x) / size, rank, size))
        same(hvd.reducescatter(x[rank], op=hvd.Sum), share(sum(x), rank, size))
        same(
            hvd.synchronize(hvd.reducescatter_async(x[rank], name="rows", op=hvd.Max)),
            share(x[-1], rank, size),
        )


def compressed(rank: int, size: int) -> None:
    x, total = numbers(rank), sum(of_all(size))
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        same(hvd.allreduce(x, op=hvd.Sum, compression=compression), total)
        same(hvd.reducescatter(x, op=hvd.Sum, compression=compression), share(total, rank, size))
        for result in hvd.grouped_allreduce([x, x.double(), x.int()], op=hvd.Sum, compression=compression):
            same(result, total.to(result.dtype))
    sent, context = hvd.Compression.bf16.compress(x)
    assert sent.dtype == torch.bfloat16
    same(hvd.Compression.bf16.decompress(sent, context), x)
    assert hvd.Compression.fp16.compress(x.long())[0].dtype == torch.int64


def from_other_devices(rank: int, size: int) -> None:
    """Tensors that are not in main memory are copied; here the copies are made of ones that are."""
    from ronde.torch.call import Call
    from ronde.torch.handles import Received
    from ronde.torch.tensors import staged
    from ronde.types import Kind

    def call(kind: Kind, name: str, **terms: Any) -> Call:
        return Call(kind, name, hvd.global_process_set, **terms)

    x, total = numbers(rank), sum(of_all(size))
    handle = staged(call(Kind.allreduce, "copied", op=hvd.Sum), x)
    same(handle.wait(), total)
    same(handle.wait(), total)
    assert handle.done()
    same(x, numbers(rank))
    view = numbers(rank).t()
    assert staged(call(Kind.allreduce, "copied back", in_place=True), view).wait() is view
    same(view, total.t())
    same(staged(call(Kind.allgather, "copied gather"), x).wait(), torch.cat(of_all(size)))
    weights = torch.nn.Parameter(numbers(rank))
    assert staged(call(Kind.broadcast, "copied broadcast", in_place=True, root=0), weights).wait() is weights
    same(weights.data, numbers(0))
    counts = [6 // size] * size
    rows, received = Received(staged(call(Kind.alltoall, "copied exchange", splits=counts), x), counts).wait()
    assert received.tolist() == counts
    assert len(rows) == 6
    if torch.cuda.is_available():
        same(hvd.allreduce(x.cuda(), op=hvd.Sum).cpu(), total)
        same(hvd.allreduce_(x.cuda(), op=hvd.Sum).cpu(), total)


def mistakes(rank: int, size: int) -> None:
    if size > 1:
        with pytest.raises(ronde.MismatchError, match="'shape'") as caught:
            hvd.allreduce(torch.zeros(rank + 1), name="shape")
        assert isinstance(caught.value, RuntimeError)
        with pytest.raises(RuntimeError, match="'type'"):
            hvd.allreduce(torch.zeros(3, dtype=torch.float64 if rank else torch.float32), name="type")
        handle = hvd.grouped_allreduce_async(
            [torch.zeros(2), torch.zeros(rank + 2), torch.zeros(3)], name="of three"
        )
        with pytest.raises(RuntimeError, match=r"group 'of three'.*\(tensor 1 of the group\)"):
            hvd.synchronize(handle)
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
            with pytest.raises(ValueError, match="in flight already"):
                hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
            hvd.barrier()
            same(hvd.synchronize(handle), torch.tensor([float(size)]))
        else:
            hvd.barrier()
            hvd.allreduce(torch.ones(1), name="twice", op=hvd.Sum)
    with pytest.raises(ValueError, match="op must be one of"):
        hvd.allreduce(torch.zeros(2), op="sum")
    same(hvd.allreduce(numbers(rank), name="shape", op=hvd.Sum), sum(of_all(size)))


CHECKS = (
    queries,
    reductions,
    scale_factors,
    the_deprecated_argument,
    in_place,
    layouts,
    asynchronous,
    grouped,
    gathered,
    broadcasts,
    exchanged,
    scattered,
    compressed,
    from_other_devices,
    mistakes,
)


def operations() -> None:
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_operations(n: int) -> None:
    ranks.run(operations, n)


def test_operations_by_tcp() -> None:
    ranks.run(over_tcp, 2, environ={"RONDE_TRANSPORT": "tcp"})


def over_tcp() -> None:
    hvd.init()
    for check in (reductions, in_place, asynchronous, grouped, exchanged, scattered):
        check(hvd.rank(), hvd.size())
    hvd.shutdown()


def test_needs_init() -> None:
    with pytest.raises(ronde.NotInitializedError):
        hvd.allreduce(torch.zeros(1))
    with pytest.raises(ronde.NotInitializedError):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
