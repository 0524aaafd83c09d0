"""Programs of `ronde.torch`, the interface of Horovod, with tensors staged in main memory and with NCCL."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.gpu.programs import (
    DTYPES,
    Check,
    all_given,
    be_a_host,
    busy_device,
    close,
    given,
    my_rank,
    my_size,
    on_cpu,
    place,
    program,
    same,
)
from tests.gpu.training import WIDTH, network, rows, sgd, train, trained_alone

import ronde
import ronde.torch as hvd
from ronde.backends.nccl import NCCL
from ronde.engine import engine
from ronde.engine.process import global_process_set
from ronde.types import DType, Kind


@contextmanager
def engine_runs() -> Iterator[None]:
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()


@program("horovod")
def horovod_operations() -> Iterator[tuple[str, Check]]:
    with engine_runs():
        yield from operation_checks()
        yield "process sets", process_sets
        yield "Join", joined


def operation_checks() -> Iterator[tuple[str, Check]]:
    yield "allreduce, each dtype and reduction", hvd_allreduces
    yield "allreduce in place, async, grouped, scaled, compressed", hvd_allreduce_in_each_way
    yield "allgather, broadcast, alltoall, reducescatter", hvd_moves
    yield "sparse allreduce, gradients, objects", hvd_others
    yield "tensors of busy streams", hvd_streams


def hvd_allreduces() -> None:
    for name in DTYPES:
        dtype = getattr(torch, name)
        everyones = all_given(1000, dtype=dtype)
        expected = {"Sum": everyones.sum(0, dtype=dtype)}
        if not dtype.is_complex:
            expected |= {"Min": everyones.amin(0), "Max": everyones.amax(0)}
            expected["Product"] = everyones.prod(0, dtype=dtype)
        if dtype.is_floating_point:
            expected["Average"] = (everyones.double().sum(0) / my_size()).to(dtype)
        for op, result in expected.items():
            same(hvd.allreduce(given(my_rank(), 1000, dtype=dtype), op=getattr(hvd, op)), result)
    whole = hvd.allreduce(given(my_rank(), 1000, dtype=torch.int32), op=hvd.Average)
    sums = all_given(1000, dtype=torch.int32).sum(0)
    same(whole, torch.div(sums, my_size(), rounding_mode="trunc").to(torch.int32))


def hvd_allreduce_in_each_way() -> None:
    expected = all_given(64, 64).sum(0)
    mine = given(my_rank(), 64, 64)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    same(mine, expected)
    same(hvd.synchronize(hvd.allreduce_async(given(my_rank(), 64, 64), op=hvd.Sum)), expected)
    several = [given(my_rank(), 64, 64), given(my_rank(), 64, 64).double(), given(my_rank(), 64, 64)[:, ::2]]
    results = hvd.grouped_allreduce(several, op=hvd.Sum)
    same(
        [each.contiguous() for each in results], [expected, expected.double(), expected[:, ::2].contiguous()]
    )
    scaled = hvd.allreduce(given(my_rank(), 100), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(scaled, 2 * all_given(100).sum(0))
    half = hvd.allreduce(given(my_rank(), 100), op=hvd.Sum, compression=hvd.Compression.fp16)
    same(half, all_given(100).sum(0))
    assert half.dtype == torch.float32


def hvd_moves() -> None:
    rank, size = my_rank(), my_size()
    uneven = hvd.allgather(given(rank, 2 + rank, 3))
    same(uneven, torch.cat([given(each, 2 + each, 3) for each in range(size)]))
    same(hvd.allgather(given(rank, 4)), all_given(4).flatten())
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        same(hvd.broadcast(given(rank, 50, dtype=dtype), size - 1), given(size - 1, 50, dtype=dtype))
    mine = given(rank, 50)
    hvd.broadcast_(mine, 0)
    same(mine, given(0, 50))
    same(hvd.alltoall(given(rank, size, 5)), all_given(size, 5)[:, rank])
    output, counts = hvd.alltoall(given(rank, 3, 2), splits=torch.tensor([1, 2][:size] if size > 1 else [3]))
    own = slice(0, 3) if size == 1 else slice(0, 1) if rank == 0 else slice(1, 3)
    same(output, torch.cat([given(each, 3, 2)[own] for each in range(size)]))
    assert counts.tolist() == [own.stop - own.start] * size
    total = all_given(3 * size, 4).sum(0)
    same(hvd.reducescatter(given(rank, 3 * size, 4), op=hvd.Sum), total.chunk(size)[rank])
    uneven = hvd.reducescatter(given(rank, 2 * size + 1, 4), op=hvd.Sum)
    ends = [0, 3, 5] if size == 2 else [0, 3]
    same(uneven, all_given(2 * size + 1, 4).sum(0)[ends[rank] : ends[rank + 1]])


def hvd_others() -> None:
    sparse = given(my_rank(), 6, 2)
    sparse[my_rank() :: 2] = 0
    result = hvd.synchronize(hvd.sparse_allreduce_async(sparse.to_sparse(), "sparse", hvd.Sum))
    parts = all_given(6, 2)
    for rank in range(my_size()):
        parts[rank, rank::2] = 0
    same(result.to_dense(), parts.sum(0))
    x = given(my_rank(), 5).requires_grad_()
    (hvd.allreduce(x, op=hvd.Sum) * (1 + my_rank())).sum().backward()
    expected = sum(1.0 + rank for rank in range(my_size()))
    same(x.grad, torch.full((5,), expected, device=place()))
    assert hvd.broadcast_object([my_rank()], 0) == [0]
    hvd.barrier()


def hvd_streams() -> None:
    if on_cpu():
        return
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy_device()
        mine = given(my_rank(), 100_000) * 2
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
    with torch.cuda.stream(other):
        total = hvd.synchronize(handle) + 1
    other.synchronize()
    same(total, 2 * all_given(100_000).sum(0) + 1)


def process_sets() -> None:
    alone = [hvd.add_process_set([rank]) for rank in range(my_size())]
    mine = given(my_rank(), 30)
    same(hvd.allreduce(mine, op=hvd.Sum, process_set=alone[my_rank()]), mine)
    for each in alone:
        hvd.remove_process_set(each)
    same(hvd.allreduce(mine, op=hvd.Sum), all_given(30).sum(0))


def joined() -> None:
    for step in range(2 + 2 * my_rank()):
        result = hvd.allreduce(given(my_rank(), 30), name=f"joined.{step}", op=hvd.Sum)
        same(result, all_given(30).sum(0) if step < 2 else given(my_rank(), 30))
    assert hvd.join() == my_size() - 1


def refused_when_joined() -> str:
    said = ""
    if my_rank() == 1:
        try:
            hvd.allreduce(given(my_rank(), 30), name="refused", op=hvd.Sum)
        except ronde.MismatchError as error:
            said = str(error)
        assert "has joined" in said, "no error"
    assert hvd.join() == 1
    return said


@program("optimizer", limit_s=80)
def optimizer() -> Iterator[tuple[str, Check]]:
    with engine_runs():
        yield from optimizer_checks()


def optimizer_checks() -> Iterator[tuple[str, Check]]:
    yield "DistributedOptimizer as on the CPU, 1e-5", optimized_as_on_cpu
    yield "DistributedOptimizer as one process with all rows", lambda: close(optimized(), trained_alone())
    yield (
        "DistributedOptimizer with float16 gradients",
        lambda: close(optimized(compression=hvd.Compression.fp16), trained_alone(), 1e-2),
    )
    yield (
        "DistributedOptimizer of bfloat16 parameters",
        lambda: close([each.float() for each in optimized(dtype=torch.bfloat16)], trained_alone(), 5e-2),
    )
    yield "groups, backward_passes_per_step, SyncBatchNorm", optimized_in_other_ways


def optimized(device: Any = None, dtype: Any = None, **how: Any) -> list[Any]:
    """Train by DistributedOptimizer, check that all ranks have the same parameters, and return them."""
    model = network(device, dtype)
    if my_rank() == 1:
        for each in model.parameters():
            each.data.zero_()  # broadcast_parameters must mend it
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped_optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **how)
    hvd.broadcast_optimizer_state(wrapped_optimizer, root_rank=0)
    parameters = train(model, wrapped_optimizer, my_rank())
    for each in parameters:
        gathered = hvd.allgather(each.flatten().unsqueeze(0))
        same(gathered, each.flatten().expand(my_size(), -1))
    return parameters


def optimized_as_on_cpu() -> None:
    there = [each.to(place()) for each in optimized(torch.device("cpu"))]
    close(optimized(), there)


def optimized_in_other_ways() -> None:
    close(optimized(num_groups=2), trained_alone())
    model = network()
    slow = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    for step in range(2):
        inputs, targets = rows(step, my_rank())
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    slow.step()
    norm = hvd.SyncBatchNorm(WIDTH).to(place())
    ours = norm(rows(0, my_rank())[0])
    whole = torch.nn.BatchNorm1d(WIDTH).to(place())(rows(0)[0])
    close(ours, whole.chunk(my_size())[my_rank()])


# The engine's backend `nccl`


def assert_engine_uses_nccl() -> None:
    """Raise AssertionError unless the engine leaves GPU tensors to NCCL, in their memory."""
    assert engine(global_process_set).carries(
        Kind.allreduce, DType.float32, ronde.Sum, torch.device("cuda", 0)
    )


@program("engine-nccl", ranks=1, limit_s=80, needs_gpu=True, RONDE_BACKENDS="nccl,native")
def engine_nccl() -> Iterator[tuple[str, Check]]:
    with engine_runs():
        yield "the engine uses NCCL", assert_engine_uses_nccl
        yield from operation_checks()
        yield from optimizer_checks()


@program("engine-hosts", limit_s=100, needs_gpu=True, RONDE_BACKENDS="nccl,native")
def engine_hosts() -> Iterator[tuple[str, Check]]:
    be_a_host()
    NCCL.claim = lambda self: ""  # type: ignore[method-assign]
    with engine_runs():
        yield "the engine uses NCCL on two ranks", assert_engine_uses_nccl
        yield from operation_checks()
        yield "process sets", process_sets
        yield "Join: an error, as a joined rank has no memory of a GPU to give", refused_when_joined
        yield from optimizer_checks()


@program("engine-shared", needs_gpu=True, RONDE_BACKENDS="nccl,native")
def engine_shared() -> Iterator[tuple[str, Check]]:
    said: list[str] = []
    keeper = logging.Handler()
    keeper.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ronde.engine").addHandler(keeper)
    with engine_runs():
        yield "two ranks on one GPU: a warning, and main memory instead", lambda: shared_gpu(said)


def shared_gpu(said: list[str]) -> str:
    same(hvd.allreduce(given(my_rank(), 30), op=hvd.Sum), all_given(30).sum(0))
    assert my_rank() > 0 or any("CUDA device" in each for each in said), said
    return said[0] if said else ""


@program("engine-refused", needs_gpu=True, RONDE_BACKENDS="native;allreduce=nccl")
def engine_refused() -> Iterator[tuple[str, Check]]:
    yield "two ranks on one GPU without another backend: UsageError", refused


def refused() -> str:
    try:
        hvd.init()
        hvd.allreduce(given(my_rank(), 3))
    except ronde.UsageError as error:
        if "CUDA device" in str(error):
            return str(error)
        raise
    raise AssertionError("no error")
