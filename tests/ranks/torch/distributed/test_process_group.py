"""What programs call on the group: forms without lists and options, sparse sums, monitored barriers, profiled calls."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.torch.distributed.groups import default_group, same, with_each_backend
from torch.distributed import _functional_collectives as functional

import ronde
from ronde.testing import ranks

LIMIT = timedelta(seconds=30)


def forms(rank: int, size: int) -> None:
    """Every operation gives what its form with lists and options gives."""
    group: Any = dist.group.WORLD
    mine = torch.full((2,), float(rank))
    every = [torch.full((2,), float(each)) for each in range(size)]
    largest, total = every[-1], sum(every, torch.zeros(2))

    def reduced(*arguments: Any, **named: Any) -> torch.Tensor:
        tensor = mine.clone()
        group.allreduce(tensor, *arguments, **named).wait()
        return tensor

    same([reduced(), reduced(dist.ReduceOp.MAX), reduced(op=dist.ReduceOp.MAX)], [total, largest, largest])
    same([reduced(timeout=LIMIT), reduced(dist.ReduceOp.MAX, LIMIT)], [total, largest])
    in_list = [mine.clone()]
    group.allreduce(in_list).wait()
    group.allreduce_coalesced([torch.ones(1), torch.ones(1)]).wait()

    moved = mine.clone()
    group.broadcast(moved, root=1).wait()
    at_root = mine.clone()
    group.reduce(at_root, 1, dist.ReduceOp.MAX, timeout=LIMIT).wait()
    same([*in_list, moved, at_root], [total, every[1], largest if rank == 1 else mine])

    gathered = [torch.empty(2) for _ in every]
    group.allgather(gathered, mine, timeout=LIMIT).wait()
    at_last = [torch.empty(2) for _ in every] if rank == size - 1 else []
    group.gather(at_last, mine, size - 1).wait()
    scattered, part = torch.empty(2), torch.empty(2)
    group.scatter(scattered, gathered if rank == 0 else [], 0).wait()
    group.reduce_scatter(part, gathered, dist.ReduceOp.SUM, LIMIT).wait()
    same([gathered, at_last], [every, every if at_last else []])
    same([scattered, part], [mine, mine * size])

    exchanged = [torch.empty(2) for _ in every]
    group.alltoall(exchanged, [mine.clone() for _ in every], LIMIT).wait()
    same(exchanged, every)
    group.barrier(timeout=LIMIT).wait()
    with pytest.raises(ronde.UsageError, match="'sum' is not an argument"):
        group.allreduce(mine, "sum")


def sparse_sums(rank: int, size: int) -> None:
    """Ranks have different numbers of values, also none, of scalars and of rows; the tensor gets the sum."""
    for shape in [(size, 4), (size, 2, 3)]:
        mine = torch.zeros(shape)
        mine[:rank] = rank
        total = torch.zeros(shape)
        for other in range(size):
            total[:other] += other
        tensor = mine.to_sparse(1)
        dist.all_reduce(tensor)
        same(tensor.to_dense(), total)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        same(tensor.to_dense(), total * size)


def monitored_barriers(rank: int, size: int) -> None:
    """All pass, or all that came raise; rank 0 names those that did not, and the next barrier works."""
    dist.monitored_barrier(timeout=LIMIT)
    dist.monitored_barrier(wait_all_ranks=True)
    if rank == 1:
        time.sleep(0.6)  # too late: rank 0 will have told that
    with pytest.raises(ronde.TimeoutError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3) if rank == 0 else LIMIT)
    if rank == 0:
        assert str(caught.value).startswith("Rank 1 failed to pass monitoredBarrier: Rank 0 timed out")
        assert caught.value.missing == (1,)
    else:
        assert f"Rank {rank} successfully reached monitoredBarrier" in str(caught.value)
    dist.monitored_barrier(timeout=LIMIT)


def profiled(rank: int, size: int) -> None:
    """Each call is one event, with the shapes of its inputs, that lasts until the operation is done."""
    received = torch.empty(5)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
        waiting = dist.irecv(received, (rank - 1) % size)
        dist.all_gather([torch.empty(4) for _ in range(size)], torch.ones(4))  # not behind the receive
        time.sleep(0.1)
        dist.send(torch.ones(5), (rank + 1) % size)
        waiting.wait()
    calls = [event.name for event in profile.function_events if event.name.startswith("c10d::")]
    assert calls == ["c10d::allreduce_", "c10d::allgather_"]
    events = {event.name: event for event in profile.function_events if event.name.startswith("ronde:")}
    assert {name: event.input_shapes for name, event in events.items()} == {
        "ronde:all_reduce": [[2, 3]],
        "ronde:recv": [[5]],
        "ronde:all_gather": [[4]],
        "ronde:send": [[5]],
    }
    assert all(event.is_async for event in events.values())
    assert events["ronde:recv"].cpu_time >= 0.09e6  # in microseconds
    with torch.autograd.profiler.profile(), pytest.raises(ronde.UsageError):
        dist.all_reduce(torch.ones(1).to(torch.float8_e4m3fn))


class Wrapping(torch.Tensor):  # type: ignore[misc]
    """A tensor without memory: its operators work on another tensor."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapping:
        make: Any = torch.Tensor
        made: Wrapping = make._make_wrapper_subclass(
            cls, wrapped.shape, wrapped.stride(), wrapped.storage_offset(), dtype=wrapped.dtype
        )
        made.wrapped = wrapped
        return made

    def __init__(self, wrapped: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*(each.wrapped if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def wrapping_tensors(rank: int, size: int) -> None:
    every = [torch.full((2,), float(each)) for each in range(size)]
    tensor = Wrapping(every[rank].clone())
    dist.all_reduce(tensor)
    same(tensor.wrapped, sum(every, torch.zeros(2)))
    # They have offsets to memory that does not exist.
    parts = [Wrapping(each) for each in torch.cat(every).split(2)]
    dist.scatter(tensor, parts if rank == 0 else None)
    same(tensor.wrapped, every[rank])
    same(functional.all_gather_tensor(tensor.wrapped, 0, dist.group.WORLD) + 0, torch.cat(every))
    waiting: Any = functional.all_reduce(tensor.wrapped, "sum", dist.group.WORLD)  # an AsyncCollectiveTensor
    dist.broadcast(waiting, 0)
    same(waiting + 0, sum(every, torch.zeros(2)))


CHECKS: Any = (forms, sparse_sums, monitored_barriers, profiled, wrapping_tensors)


def calls(folder: str) -> None:
    with default_group(folder) as (rank, size):
        for check in CHECKS:
            check(rank, size)
            dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_process_group(size: int, tmp_path: Path) -> None:
    ranks.run(calls, size, str(tmp_path))


def groups_of_others(folder: str) -> None:
    with default_group(folder, "gloo"):
        dist.monitored_barrier(timeout=LIMIT)
        ours = dist.new_group(backend="ronde")
        dist.monitored_barrier(ours, timeout=LIMIT)


def test_monitored_barriers_of_groups_of_two_backends(tmp_path: Path) -> None:
    ranks.run(groups_of_others, 2, str(tmp_path))


def counted() -> dict[str, int]:
    """Return how often CommDebugMode counts which operator."""
    from torch.distributed.tensor.debug import CommDebugMode  # PyTorch 2.5 and later

    size = dist.get_world_size()
    group: Any = dist.group.WORLD
    x = torch.ones(size)
    parts = [torch.empty(1) for _ in range(size)]
    with CommDebugMode() as mode:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather(parts, x[:1])
        dist.all_gather_into_tensor(torch.empty(size), x[:1])
        dist.reduce_scatter_tensor(torch.empty(1), x)
        dist.all_to_all_single(torch.empty(size), x)
        dist.gather(x[:1], parts if dist.get_rank() == 0 else None)
        dist.scatter(parts[0], list(x.split(1)) if dist.get_rank() == 0 else None)
        functional.all_reduce(x, "sum", group).add_(1)
        dist.barrier()
        outer_counts = sum(mode.get_comm_counts().values())
        with CommDebugMode() as inner:
            dist.all_reduce(x)
        assert sum(inner.get_comm_counts().values()) == 1
    assert mode.get_total_counts() == outer_counts + 1
    mode.generate_comm_debug_tracing_table()
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}


def counts(folder: str) -> None:
    found = with_each_backend(folder, counted)
    assert found["ronde"] == found["gloo"]


def test_the_debug_mode_counts_calls_as_with_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor.debug")
    ranks.run(counts, 2, str(tmp_path))
