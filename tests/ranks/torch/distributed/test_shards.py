"""FSDP2, HSDP, tensor parallelism, DTensor, compilation, checkpoints and pipelines, with the results of Gloo.

Of FSDP2's reduce-scatter with Gloo this knows that it sums where it should average: `fully_shard` divides there.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tests.ranks.torch.distributed.groups import (
    close,
    default_group,
    mesh_of,
    same,
    with_each_backend,
)
from tests.ranks.torch.distributed.transformer import (
    WIDTH,
    agree_on_all_ranks,
    batch,
    loss_of,
    sgd,
    train,
    transformer,
    values,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ronde.testing import ranks


def sharded(mesh: Any = None, **how: Any) -> Any:
    model = transformer()
    mesh = mesh or mesh_of(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def plain() -> list[Any]:
    model = sharded()
    return train(model, sgd(model))


def mixed_precision() -> list[Any]:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return train(model, sgd(model))


def mixed_reduction() -> list[Any]:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return train(model, sgd(model))


def accumulated() -> list[Any]:
    model = sharded()
    optimizer = sgd(model)
    for step in range(6):
        model.set_requires_gradient_sync(step % 3 == 2)
        loss_of(model, batch(step)).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def clipped() -> list[Any]:
    model = sharded()
    optimizer = sgd(model)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
        optimizer.step()
    return [*values(model), *norms]


def no_reshard() -> list[Any]:
    model = sharded(reshard_after_forward=False)
    return train(model, sgd(model))


def first_version() -> list[Any]:
    """FullyShardedDataParallel, the class before `fully_shard`."""
    model = FullyShardedDataParallel(transformer(), device_id=torch.device("cpu"))
    train(model, sgd(model))
    with FullyShardedDataParallel.summon_full_params(model):
        return values(model)


def hybrid() -> list[Any]:
    mesh = mesh_of(2, dist.get_world_size() // 2, names=("replicate", "shard"))
    model = sharded(mesh)
    return train(model, sgd(model))


def tensor_parallel(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensors_and_shards() -> list[Any]:
    """Tensor parallelism within FSDP2. Ranks of one row of the mesh have the same data."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    model = tensor_parallel(transformer(), mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        rows = batch(step).shape[0] * 2
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(20, (rows * mesh["data"].size(), 6), generator=generator)
        loss_of(model, words.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]).backward()
        optimizer.step()
    return values(model)


def distributed_tensors() -> list[Any]:
    mesh = mesh_of(dist.get_world_size())
    whole = torch.arange(96.0).view(12, 8)
    rows, columns = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(1)])
    uneven = distribute_tensor(whole[:7], mesh, [Shard(0)])
    partial = DTensor.from_local(whole + dist.get_rank(), mesh, [Partial()])
    return [
        (rows @ columns.t()).full_tensor(),
        rows.redistribute(mesh, [Shard(1)]).to_local(),
        (uneven * 2).full_tensor(),
        partial.redistribute(mesh, [Replicate()]).to_local(),
        partial.redistribute(mesh, [Shard(0)]).to_local(),
        rows.sum(0).full_tensor(),
        columns.norm().full_tensor(),
    ]


def functional() -> list[Any]:
    from torch.distributed import _functional_collectives as functions

    group, size = dist.group.WORLD, dist.get_world_size()
    x = torch.arange(4.0 * size) + dist.get_rank()
    return [
        functions.all_reduce(x, "sum", group) + 0,
        functions.all_reduce(x, "avg", group) + 0 if dist.get_backend() == "ronde" else average(x),
        functions.all_gather_tensor(x, 0, group) + 0,
        functions.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        functions.all_to_all_single(x, None, None, group) + 0,
        functions.broadcast(x, 1, group) + 0,
        *(each + 0 for each in functions.all_reduce_coalesced([x, x * 2], "sum", group)),
        *(each + 0 for each in functions.all_gather_into_tensor_coalesced([x, x * 2], group)),
        *(each + 0 for each in functions.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)),
    ]


def average(x: Any) -> Any:
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


PROGRAMS = (
    *(plain, mixed_precision, mixed_reduction, accumulated, clipped, no_reshard, first_version),
    *(hybrid, tensors_and_shards, distributed_tensors, functional),
)
LOOSE = (mixed_precision, mixed_reduction)
OF_RANK = (distributed_tensors, functional)


def run_all() -> dict[str, Any]:
    results = {}
    for program in PROGRAMS:
        results[program.__name__] = program()
        if program not in OF_RANK:
            agree_on_all_ranks(results[program.__name__])
    return results


def compare(folder: str) -> None:
    results = with_each_backend(folder, run_all)
    for program in PROGRAMS:
        ours, theirs = (results[backend][program.__name__] for backend in ("ronde", "gloo"))
        try:
            close(ours, theirs, 2e-2 if program in LOOSE else 1e-6)
        except AssertionError as error:
            raise AssertionError(f"{program.__name__}: {error}") from None


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_parameters_as_with_gloo(size: int, tmp_path: Path) -> None:
    ranks.run(compare, size, str(tmp_path))


def dies_in_backward(folder: str) -> tuple[str, float]:
    with default_group(folder) as (rank, size):
        model = sharded()
        optimizer = sgd(model)
        train(model, optimizer, steps=1)
        loss = loss_of(model, batch(1))
        if rank == size - 1:
            Path(folder, "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:  # noqa: PT012
            loss.backward()
            optimizer.step()
        return str(caught.value), time.monotonic() - float(Path(folder, "died").read_text())


def test_killed_in_backward(tmp_path: Path) -> None:
    with ranks.start(dies_in_backward, 3, str(tmp_path)) as job:
        for outcome in job.outcomes()[:2]:
            assert outcome.error is None, outcome.traceback_text
            text, took_s = outcome.value
            assert f"rank 2 on {socket.gethostname()}" in text
            assert took_s < 10  # a machine with much else to do takes its time


# Checkpoints


def saved(folder: str) -> list[Any]:
    with default_group(folder):
        model = sharded()
        results = train(model, sgd(model))
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/checkpoint")
        work = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=f"{folder}/later")
        work.result()
        return [each.numpy() for each in results]


def loaded(folder: str, name: str) -> list[Any]:
    with default_group(folder):
        torch.manual_seed(1)
        model = sharded()
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        state = {"model": model.state_dict()}
        checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(state["model"])
        return [each.numpy() for each in values(model)]


def test_a_checkpoint_of_two_ranks_is_loaded_by_three(tmp_path: Path) -> None:
    expected = ranks.run(saved, 2, str(tmp_path))[0]
    for name in ("checkpoint", "later"):
        folder = tmp_path / f"meet-{name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / name)
        for result in ranks.run(loaded, 3, str(folder), name):
            assert all((one == other).all() for one, other in zip(result, expected, strict=True))


# Pipelines


class Part(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.layer(x))


def pipelined() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list[Any] = []
    for make in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        several = 2 if make is ScheduleInterleaved1F1B else 1
        parts = [Part(rank + size * index) for index in range(several)]
        stages = [
            PipelineStage(part, rank + size * index, several * size, torch.device("cpu"))
            for index, part in enumerate(parts)
        ]
        schedule = make(
            stages if several > 1 else stages[0], 4, loss_fn=torch.nn.functional.mse_loss
        )  # 4 microbatches
        torch.manual_seed(3)
        given, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        losses: list[Any] = []
        for _ in range(2):
            how = {"target": target, "losses": losses} if rank == size - 1 else {}
            schedule.step(*([given] if rank == 0 else []), **how)
        results += [each.grad.clone() for part in parts for each in part.parameters()]
        results += losses
    return results


def compare_pipelines(folder: str) -> None:
    results = with_each_backend(folder, pipelined)
    same(results["ronde"], results["gloo"])


def test_pipelines(tmp_path: Path) -> None:
    ranks.run(compare_pipelines, 2, str(tmp_path))


# Compilation


def compiled() -> list[Any]:
    from torch.distributed import _functional_collectives as functions
    from torch.nn.parallel import DistributedDataParallel

    group = dist.group.WORLD

    def reduced(x: Any) -> Any:
        return functions.all_reduce(x * 2, "sum", group) + 1

    def gathered(x: Any) -> Any:
        return functions.all_gather_tensor(x + 1, 0, group) * 2

    def in_place(x: Any) -> Any:
        y = x * 3
        dist.all_reduce(y)
        return y - 1

    x = torch.arange(6.0) + dist.get_rank()
    results = [
        torch.compile(each, backend="aot_eager", fullgraph=True)(x) for each in (reduced, gathered, in_place)
    ]
    model = torch.compile(DistributedDataParallel(transformer(1)), backend="aot_eager")
    return results + train(model, sgd(model))


def compare_compiled(folder: str) -> None:
    results = with_each_backend(folder, compiled)
    same(results["ronde"], results["gloo"])


def test_compiled(tmp_path: Path) -> None:
    ranks.run(compare_compiled, 2, str(tmp_path))
