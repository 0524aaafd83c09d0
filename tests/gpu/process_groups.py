"""Programs of the backend "ronde" of torch.distributed, compared with PyTorch's own backends."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
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
from tests.gpu.training import network, rows, sgd, train, trained_alone
from torch.distributed import _functional_collectives as functions
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ronde.torch.distributed  # noqa: F401, makes the backend known

_numbers = itertools.count()  # of the default groups, the same on all ranks


@contextmanager
def group(backend: str) -> Iterator[None]:
    """Make the default group of torch.distributed for the block."""
    store = dist.FileStore(os.path.join(os.environ["CHECK_FOLDER"], f"store-{next(_numbers)}"), my_size())
    dist.init_process_group(
        backend, store=store, rank=my_rank(), world_size=my_size(), timeout=timedelta(seconds=30)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@program("collectives")
def collectives() -> Iterator[tuple[str, Check]]:
    with group("ronde"):
        yield "all_reduce, each dtype and reduction", all_reduce_of_all_types
        yield "all_reduce async, coalesced, by a future, not contiguous", all_reduce_in_each_way
        yield "results on a busy stream that is not the default one", on_another_stream
        yield "broadcast, reduce, gather, scatter", rooted
        yield "all_gather, also uneven and into a tensor", all_gathers
        yield "reduce_scatter, also uneven, of a tensor and AVG", reduce_scatters
        yield "all_to_all, also uneven", all_to_alls
        yield "send and recv, tags, batch_isend_irecv", messages
        yield "objects, barrier, sub-groups", objects_and_groups
        yield "functional collectives", functional


def all_reduce_of_all_types() -> None:
    for name in DTYPES:
        dtype = getattr(torch, name)
        everyones = all_given(1000, dtype=dtype)
        expected = {"SUM": everyones.sum(0, dtype=dtype)}
        if not dtype.is_complex:
            expected |= {"MIN": everyones.amin(0), "MAX": everyones.amax(0)}
            expected["PRODUCT"] = everyones.prod(0, dtype=dtype)
        if dtype.is_floating_point:
            expected["AVG"] = (everyones.double().sum(0) / my_size()).to(dtype)
        for op, result in expected.items():
            mine = given(my_rank(), 1000, dtype=dtype)
            dist.all_reduce(mine, getattr(dist.ReduceOp, op))
            same(mine, result)
    bits = given(my_rank(), 100, dtype=torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.BXOR)
    everyones = all_given(100, dtype=torch.int32)
    same(bits, everyones[0] ^ everyones[1])
    scaled = given(my_rank(), 100)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    same(scaled, all_given(100).sum(0) / 2)


def all_reduce_in_each_way() -> None:
    expected = all_given(64, 64).sum(0)
    mine = given(my_rank(), 64, 64)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    same(mine, expected)

    mine = given(my_rank(), 64, 64)
    future = dist.all_reduce(mine, async_op=True).get_future().then(lambda done: done.value()[0] + 1)
    same(future.wait(), expected + 1)

    wide = torch.zeros(64, 128, device=place())
    columns = wide[:, ::2]
    columns.copy_(given(my_rank(), 64, 64))
    dist.all_reduce(columns)
    same(wide[:, ::2], expected)
    same(wide[:, 1::2], torch.zeros(64, 64, device=place()))

    several = [given(my_rank(), 64, 64) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as works:
        for each in several:
            dist.all_reduce(each)
    works.wait()
    same(several, [expected] * 3)


def on_another_stream() -> None:
    if on_cpu():
        return
    stream = torch.cuda.Stream()
    for by_future in (False, True):
        with torch.cuda.stream(stream):
            busy_device()
            mine = given(my_rank(), 100_000)
            output = torch.zeros(my_size() * 100_000, device=place())
            busy_device()
            output.fill_(-1)  # The device has not done this when the call begins; the results come later.
            work = dist.all_gather_into_tensor(output, mine, async_op=True)
            if by_future:
                work.get_future().wait()
            else:
                work.wait()
            total = output.clone()
        stream.synchronize()
        same(total, all_given(100_000).flatten())


def rooted() -> None:
    rank, everyones = my_rank(), all_given(300)
    mine = given(rank, 300)
    dist.broadcast(mine, 1)
    same(mine, everyones[1])
    mine = given(rank, 300)
    dist.reduce(mine, 1)
    same(mine, everyones.sum(0) if rank == 1 else everyones[rank])
    parts = [torch.empty(300, device=place()) for _ in range(my_size())] if rank == 0 else None
    dist.gather(given(rank, 300), parts, 0)
    if parts is not None:
        same(parts, list(everyones))
    mine = torch.empty(300, device=place())
    dist.scatter(mine, list(everyones) if rank == 0 else None, 0)
    same(mine, everyones[rank])


def all_gathers() -> None:
    rank, everyones = my_rank(), all_given(300)
    parts = [torch.empty(300, device=place()) for _ in range(my_size())]
    dist.all_gather(parts, given(rank, 300))
    same(parts, list(everyones))
    uneven = [torch.empty(3 + each, device=place()) for each in range(my_size())]
    dist.all_gather(uneven, given(rank, 3 + rank))
    same(uneven, [given(each, 3 + each) for each in range(my_size())])
    whole = torch.empty(300 * my_size(), device=place())
    dist.all_gather_into_tensor(whole, given(rank, 300))
    same(whole, everyones.flatten())


def reduce_scatters() -> None:
    rank, total = my_rank(), all_given(my_size(), 300).sum(0)
    mine = torch.empty(300, device=place())
    dist.reduce_scatter(mine, list(given(rank, my_size(), 300)))
    same(mine, total[rank])
    uneven = torch.empty(3 + rank, device=place())
    dist.reduce_scatter(uneven, [given(rank + each, 3 + each) for each in range(my_size())])
    same(uneven, sum(given(other + rank, 3 + rank) for other in range(my_size())))
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / my_size())):
        dist.reduce_scatter_tensor(mine, given(rank, my_size(), 300).flatten(), op)
        same(mine, expected[rank])


def all_to_alls() -> None:
    rank, size = my_rank(), my_size()
    everyones = all_given(size, 50)
    output = torch.empty(size, 50, device=place())
    dist.all_to_all_single(output, given(rank, size, 50))
    same(output, everyones[:, rank])
    parts = [torch.empty(50, device=place()) for _ in range(size)]
    dist.all_to_all(parts, list(given(rank, size, 50)))
    same(parts, list(everyones[:, rank]))
    # Rank r sends r + 1 rows to the first rank, r + 2 to the second.
    mine = given(rank, sum(rank + 1 + other for other in range(size)), 4)
    output = torch.empty(sum(other + 1 + rank for other in range(size)), 4, device=place())
    dist.all_to_all_single(
        output,
        mine,
        [other + 1 + rank for other in range(size)],
        [rank + 1 + other for other in range(size)],
    )
    sent = [given(other, sum(other + 1 + each for each in range(size)), 4) for other in range(size)]
    split = [each.split([other + 1 + one for one in range(size)])[rank] for other, each in enumerate(sent)]
    same(output, torch.cat(split))


def messages() -> None:
    rank, other = my_rank(), 1 - my_rank()
    mine, theirs = torch.empty(700, device=place()), given(other, 700)
    if rank == 0:
        dist.send(given(rank, 700), other)
        dist.recv(mine, other)
    else:
        dist.recv(mine, other)
        dist.send(given(rank, 700), other)
    same(mine, theirs)
    first, second = torch.empty(5, device=place()), torch.empty(5, device=place())
    sends = [dist.isend(given(10 * rank + tag, 5), other, tag=tag) for tag in (1, 2)]
    receives = [dist.irecv(second, other, tag=2), dist.irecv(first, other, tag=1)]
    for work in (*receives, *sends):
        work.wait()
    same([first, second], [given(10 * other + 1, 5), given(10 * other + 2, 5)])
    mine = torch.empty(700, device=place())
    batch = [dist.P2POp(dist.isend, given(rank, 700), other), dist.P2POp(dist.irecv, mine, other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    same(mine, theirs)


def objects_and_groups() -> None:
    everyones: list[Any] = [None] * my_size()
    dist.all_gather_object(everyones, {"rank": my_rank(), "tensor": given(my_rank(), 3)})
    assert [each["rank"] for each in everyones] == list(range(my_size()))
    same(everyones[0]["tensor"], given(0, 3))
    dist.barrier()
    alone = [dist.new_group([rank]) for rank in range(my_size())][my_rank()]
    both = dist.new_group()
    mine = given(my_rank(), 3)
    dist.all_reduce(mine, group=alone)
    same(mine, given(my_rank(), 3))
    dist.all_reduce(mine, group=both)
    same(mine, all_given(3).sum(0))


def functional() -> None:
    world = dist.group.WORLD
    same(functions.all_reduce(given(my_rank(), 8), "sum", world) + 0, all_given(8).sum(0))
    gathered = functions.all_gather_tensor(given(my_rank(), 8), 0, world)
    same(gathered + 0, all_given(8).flatten())
    scattered = functions.reduce_scatter_tensor(given(my_rank(), 8), "sum", 0, world)
    same(scattered + 0, all_given(8).sum(0).chunk(my_size())[my_rank()])


@program("ddp", limit_s=80)
def ddp() -> Iterator[tuple[str, Check]]:
    results: dict[str, Any] = {}

    def run(how: Callable[[], list[Any]]) -> Check:
        def check() -> None:
            for backend in ("gloo", "ronde"):
                with group(backend):
                    results[backend] = how()
            same(results["ronde"], results["gloo"])

        return check

    yield "DDP as with gloo, bit by bit", run(ddp_plain)
    yield "DDP as one process with all rows, 1e-5", lambda: close(results["ronde"], trained_alone())
    yield "DDP with views of buckets and no_sync", run(ddp_accumulated)
    yield "DDP of bfloat16 parameters", run(ddp_of_bfloat16)
    yield "DDP with the float16 communication hook", run(ddp_with_hook)


def wrapped(model: Any, **how: Any) -> Any:
    return DistributedDataParallel(model, device_ids=None if on_cpu() else [0], bucket_cap_mb=0.05, **how)


def ddp_plain() -> list[Any]:
    model = wrapped(network())
    return train(model, sgd(model), my_rank())


def ddp_accumulated() -> list[Any]:
    model = wrapped(network(), gradient_as_bucket_view=True)
    with model.no_sync():
        inputs, targets = rows(100, my_rank())
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    return train(model, sgd(model), my_rank())


def ddp_of_bfloat16() -> list[Any]:
    model = wrapped(network(dtype=torch.bfloat16))
    return train(model, sgd(model), my_rank())


def ddp_with_hook() -> list[Any]:
    model = wrapped(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, sgd(model), my_rank())


@program("fsdp", limit_s=80)
def fsdp() -> Iterator[tuple[str, Check]]:
    yield "FSDP2 as one process with all rows, 1e-5", fsdp_as_alone
    yield "FSDP2 as with gloo, 1e-6", lambda: fsdp_as_with_gloo(1e-6)
    yield "FSDP2 of bfloat16, not resharded, as with gloo, 1e-2", lambda: fsdp_as_with_gloo(1e-2, True)


def fsdp_as_alone() -> None:
    with group("ronde"):
        model = sharded("ronde")
        train(model, sgd(model), my_rank())
        close([each.full_tensor().detach() for each in model.parameters()], trained_alone())


def fsdp_as_with_gloo(tolerance: float, in_bfloat16: bool = False) -> None:
    """Compare shards: Gloo ends the process in `full_tensor` of a GPU's tensor."""
    results = {}
    for backend in ("ronde", "gloo"):
        with group(backend):
            model = sharded(backend, in_bfloat16)
            results[backend] = train(model, sgd(model), my_rank())
    close(results["ronde"], results["gloo"], tolerance)


def sharded(backend: str, in_bfloat16: bool = False) -> Any:
    """Return the model, sharded by FSDP2."""
    mesh = init_device_mesh(place().type, (my_size(),), backend_override={0: backend})
    how: dict[str, Any] = {"mesh": mesh}
    if in_bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        how |= {"mp_policy": policy, "reshard_after_forward": False}
    model = network()
    for layer in model:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


@program("speed", limit_s=60)
def speed() -> Iterator[tuple[str, Check]]:
    """All-reduces of GPU tensors through main memory: no check, only times."""
    yield "all_reduce of 4 B, 1 MiB, 64 MiB", lambda: "; ".join(map(times_of, ("ronde", "gloo")))


def times_of(backend: str) -> str:
    times = []
    with group(backend):
        for elements in (1, 1 << 18, 1 << 24):
            x = torch.ones(elements, device=place())
            took = []
            for _ in range(21):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(x)
                float(x[0])
                took.append(time.perf_counter() - began)
            times.append(f"{1000 * sorted(took)[10]:.2f}")
    return f"{backend} {', '.join(times)} ms"


# NCCL beside ronde in one group


@program("mixed", ranks=1, needs_gpu=True)
def mixed() -> Iterator[tuple[str, Check]]:
    with group("cpu:ronde,cuda:nccl"):
        yield "operations of GPU tensors go to NCCL", operations_go_to_nccl
        yield "operations of tensors in main memory go to ronde", operations_go_to_ronde
        yield "DDP through NCCL", lambda: close(ddp_plain(), trained_alone())
    with group("nccl"):
        yield "the same by NCCL alone", lambda: close(ddp_plain(), trained_alone())


def count_of_nccl(group: Any = None) -> int:
    """Return how many operations NCCL's part of the group (None: the default group) has had."""
    group = dist.group.WORLD if group is None else group
    part = group.others["cuda"] if hasattr(group, "others") else group._get_backend(torch.device("cuda"))
    return int(part._get_sequence_number_for_group())


def operations_go_to_nccl() -> None:
    x, output = given(0, 100), torch.empty(100, device=place())
    dist.all_reduce(x)
    before = count_of_nccl()
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather_into_tensor(output, x)
    same(output, given(0, 100))
    dist.reduce_scatter_tensor(output, x, dist.ReduceOp.AVG)
    dist.all_to_all_single(output, x)
    dist.all_gather([output], x)
    dist.barrier()
    torch.cuda.synchronize()
    same(output, given(0, 100))
    assert count_of_nccl() >= before + 6, f"NCCL had {count_of_nccl() - before} operations, not 6"


def operations_go_to_ronde() -> None:
    before = count_of_nccl()
    x = torch.arange(5.0)
    dist.all_reduce(x)
    same(x, torch.arange(5.0))
    everyones: list[Any] = [None]
    dist.all_gather_object(everyones, "text")
    assert everyones == ["text"]
    assert count_of_nccl() == before


@program("mixed-shared", limit_s=45, needs_gpu=True)
def mixed_shared() -> Iterator[tuple[str, Check]]:
    with group("cpu:ronde,cuda:nccl"):
        yield "NCCL refuses two ranks on one GPU, with an error", nccl_refuses
        yield "ronde carries on in main memory", main_memory_works


def nccl_refuses() -> str:
    try:
        dist.all_reduce(given(my_rank(), 10))
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        if "GPU" in last:
            return last
        raise
    raise AssertionError("NCCL has not refused")


def main_memory_works() -> None:
    x = torch.full((5,), 1.0 + my_rank())
    dist.all_reduce(x)
    same(x, torch.full((5,), 3.0))


@program("mixed-hosts", limit_s=80, needs_gpu=True)
def mixed_hosts() -> Iterator[tuple[str, Check]]:
    be_a_host()
    with group("cpu:ronde,cuda:nccl"):
        yield "all_reduce by NCCL of two ranks", nccl_of_two_ranks
        yield "DDP by NCCL of two ranks", lambda: close(ddp_plain(), trained_alone())
        yield "FSDP2 by NCCL of two ranks", fsdp_by_nccl


def nccl_of_two_ranks() -> None:
    x = given(my_rank(), 1000)
    dist.all_reduce(x)
    same(x, all_given(1000).sum(0))


def fsdp_by_nccl() -> None:
    """With one rank FSDP2 has no communication."""
    model = sharded("cpu:ronde,cuda:nccl")
    group: Any = next(model.parameters()).device_mesh.get_group()  # not the default one: FSDP2 makes its own
    before = count_of_nccl(group)
    train(model, sgd(model), my_rank())
    close([each.full_tensor().detach() for each in model.parameters()], trained_alone())
    assert count_of_nccl(group) > before, "NCCL had no operations"
