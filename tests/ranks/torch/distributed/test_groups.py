"""Groups of the backend "ronde": made in every way, compared with Gloo's, and nothing is left of those destroyed."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.torch.distributed.groups import close, default_group, mesh_of, same, with_each_backend
from torch.distributed import _functional_collectives as functions
from torch.distributed.device_mesh import init_device_mesh

import ronde
from ronde.stores.torch import TorchStore
from ronde.testing import ranks


def members_of(group: Any, of: list[int]) -> None:
    """The group has these ranks of the default group, in this order, and its collectives work."""
    rank = dist.get_rank()
    if rank not in of:
        return
    assert dist.get_process_group_ranks(group) == of
    assert dist.get_backend(group) == "ronde"
    assert dist.get_rank(group) == of.index(rank)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(of)
    told = torch.tensor([rank])
    dist.broadcast(told, of[-1], group=group)
    assert told.item() == of[-1]
    parts = [torch.zeros(1, dtype=torch.int64) for _ in of]
    dist.all_gather(parts, torch.tensor([rank]), group=group)
    assert [int(part) for part in parts] == of


def made_in_every_way(folder: str) -> None:
    with default_group(folder) as (rank, size):
        everyone = list(range(size))
        for of in ([0, 1], [size - 1, 0], [1], everyone, everyone[::-1]):
            members_of(dist.new_group(of), sorted(of))  # PyTorch sorts them
        of = [0, 1] if rank < 2 else [2]
        members_of(dist.new_group(of, use_local_synchronization=True), of)
        members_of(dist.new_subgroups(1)[0], [rank])
        inner = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            with dist.distributed_c10d._coalescing_manager(group=inner):
                several = [torch.ones(2), torch.ones(3)]
                for each in several:
                    dist.all_reduce(each, group=inner)
            same(several, [torch.full((2,), 2.0), torch.full((3,), 2.0)])
            dist.destroy_process_group(inner)
        dist.barrier()
        # The others do not know of this one. PyTorch gives it the number of groups that its members have, which has to
        # be the same, and later versions count it only where it is made, so that it has to be the last.
        if rank < 2:
            members_of(dist.new_group([0, 1], use_local_synchronization=True), [0, 1])


def split(folder: str) -> None:
    """`split_group`, which earlier versions of PyTorch allow with a GPU alone: here its method of the group."""
    with default_group(folder) as (rank, _):
        world: Any = dist.group.WORLD
        for count in range(2):
            of = [0, 1] if rank < 2 else [2]
            half = world.split_group(of, group_name=f"half {of} {count}", group_desc="half")
            assert (half.group_desc, half.size()) == ("half", len(of))
            total = torch.tensor([float(rank)])
            half.allreduce([total], dist.AllreduceOptions()).wait()
            assert total.item() == sum(of)
            half.shutdown()
        assert world.split_group([1, 0], group_name="reversed") is None or rank < 2
        if torch.__version__ >= "2.15":  # before, PyTorch only splits groups that are bound to an accelerator
            of = [1, 2] if rank else [0]
            members_of(dist.split_group(split_ranks=[[1, 2], [0]]), of)
            members_of(dist.split_group(split_ranks=[[2, 1]]), [2, 1] if rank else [-1])


def test_split_groups(tmp_path: Path) -> None:
    ranks.run(split, 3, str(tmp_path))


def test_groups_made_in_every_way(tmp_path: Path) -> None:
    ranks.run(made_in_every_way, 3, str(tmp_path))


def meshes(folder: str) -> None:
    with default_group(folder) as (rank, _):
        mesh = mesh_of(2, 2, names=("rows", "columns"))
        row, column = divmod(rank, 2)
        members_of(mesh.get_group("rows"), [column, column + 2])
        members_of(mesh.get_group("columns"), [2 * row, 2 * row + 1])
        members_of(init_device_mesh("cpu", (4,)).get_group(), [0, 1, 2, 3])
        members_of(mesh["columns"].get_group(), [2 * row, 2 * row + 1])


def test_meshes(tmp_path: Path) -> None:
    ranks.run(meshes, 4, str(tmp_path))


def again(folder: str) -> None:
    """A default group after another, in one process, with another backend in between."""
    for round_ in range(3):
        for backend in ("ronde", "gloo"):
            with default_group(folder, backend) as (rank, size):
                total = torch.tensor([rank + round_])
                dist.all_reduce(total)
                assert total.item() == sum(range(size)) + size * round_


def test_default_groups_one_after_another(tmp_path: Path) -> None:
    ranks.run(again, 2, str(tmp_path))


UNDER_TORCHRUN = """
import torch, torch.distributed as dist
import ronde.torch.distributed

for count in range(3):
    dist.init_process_group("ronde")
    total = torch.tensor([dist.get_rank() + count])
    dist.all_reduce(total)
    assert total.item() == 1 + 2 * count
    group = dist.new_group([0, 1])
    dist.all_reduce(total, group=group)
    assert total.item() == 2 + 4 * count
    dist.destroy_process_group()
"""


def test_default_groups_of_one_store(tmp_path: Path) -> None:
    """The store of torchrun stays while groups come and go."""
    program = tmp_path / "program.py"
    program.write_text(UNDER_TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*torchrun, program], check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def beside_gloo(folder: str) -> None:
    """A group of ours where the default group is Gloo's, and the other way round."""
    with default_group(folder, "gloo") as (_, size):
        members_of(dist.new_group(backend="ronde"), list(range(size)))
        members_of(dist.new_group([0, 1], backend="ronde"), [0, 1])
    with default_group(folder, "cpu:ronde,cuda:gloo"):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        other = dist.new_group(backend="gloo")
        dist.all_reduce(total, group=other)
        assert total.item() == size * size


def through_gloo(folder: str) -> None:
    """A group whose tensors are all those of the other backend, as those on a GPU are NCCL's."""
    with default_group(folder, "cpu:gloo,cuda:ronde") as (rank, size):
        world = dist.group.WORLD
        mine = torch.full((2,), float(rank))
        gathered = functions.all_gather_tensor(mine, 0, world) + 0
        assert gathered.tolist() == [float(each) for each in range(size) for _ in range(2)]
        several = functions.all_gather_into_tensor_coalesced([mine, mine], world)
        assert all(torch.equal(each + 0, gathered) for each in several)
        total = functions.reduce_scatter_tensor(gathered, "sum", 0, world) + 0
        assert total.tolist() == [float(size * rank)] * 2
    assert not getattr(world, "others", {}), "Gloo has not ended with the group"


def test_tensors_of_the_other_backend(tmp_path: Path) -> None:
    ranks.run(through_gloo, 2, str(tmp_path))


def late_at_a_file(path: str) -> None:
    store = TorchStore(dist.FileStore(path, 1), path)
    with pytest.raises(ronde.TimeoutError, match="absent"):
        store.wait(["absent"], 10**7)


def test_a_store_in_a_file_says_that_a_timeout_is_over(tmp_path: Path) -> None:
    ranks.run(late_at_a_file, 1, str(tmp_path / "store"))


def test_groups_beside_those_of_gloo(tmp_path: Path) -> None:
    ranks.run(beside_gloo, 3, str(tmp_path))


def used(folder: str = "/proc/self") -> tuple[int, int, int, int]:
    """Return this process's descriptors, threads, mappings of shared memory, and peak memory in KiB."""
    maps = Path(folder, "maps").read_text()
    threads = len(os.listdir(f"{folder}/task"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return len(os.listdir(f"{folder}/fd")), threads, maps.count("/dev/shm") + maps.count("memfd"), peak


def many(folder: str, count: int) -> None:
    with default_group(folder) as (rank, size):
        for number in range(count):
            if number == min(count // 2, 20):
                dist.barrier()
                before = used()
            of = [0, 1] if number % 2 else list(range(size))
            group = dist.new_group(of)
            if rank in of:
                total = torch.ones(1)
                dist.all_reduce(total, group=group, async_op=True).get_future().wait()
                assert total.item() == len(of)
                dist.destroy_process_group(group)
        dist.barrier()
        after = used()
        assert after[:3] <= tuple(map(sum, zip(before[:3], (2, 1, 2)))), (before, after)
        assert after[3] - before[3] < 20_000 + 10 * count, (before, after)


def test_many_groups_leave_nothing(tmp_path: Path) -> None:
    ranks.run(many, 3, str(tmp_path), 100)


@pytest.mark.slow
def test_a_thousand_groups_leave_nothing(tmp_path: Path) -> None:
    ranks.run(many, 3, str(tmp_path), 1000)


def by_threads(folder: str) -> None:
    """Two groups, each used by a thread of its own, while a third thread sends messages."""
    with default_group(folder) as (rank, size):
        groups = [dist.new_group() for _ in range(2)]
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for step in range(100):
                    total = torch.full((number * 5000 + 10,), float(rank + step))
                    dist.all_reduce(total, group=groups[number], async_op=step % 3 == 0) and None
                    if step % 3:
                        same(total, torch.full_like(total, sum(range(size)) + size * step))
                    dist.barrier(group=groups[number])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for step in range(100):
            result = torch.empty(1)
            sent = dist.isend(torch.tensor([float(step)]), (rank + 1) % size)
            dist.recv(result, (rank - 1) % size)
            sent.wait()
            assert result.item() == step
        for thread in threads:
            thread.join()
        assert not errors, errors


def test_two_groups_from_two_threads(tmp_path: Path) -> None:
    ranks.run(by_threads, 2, str(tmp_path))


# Random sequences


def sequence(seed: int) -> list[Any]:
    """Make some random groups and operations on them, the same on every rank; return this rank's results."""
    choose, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    memberships = [sorted(choose.sample(range(size), choose.randint(1, size))) for _ in range(2)]
    groups = [(dist.new_group(of), of) for of in memberships] + [(None, list(range(size)))]
    results: list[Any] = []
    for step in range(choose.randint(3, 8)):
        group, of = choose.choice(groups)
        operation = choose.choice(OPERATIONS)
        count = choose.choice((0, 1, 2, 7, 100, 3000))
        root = choose.choice(of)
        op = choose.choice((dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        if operation is reduce_scatter:
            op = dist.ReduceOp.SUM  # Gloo of PyTorch 2.6 adds up, whatever the reduction
        dtype = choose.choice((torch.float32, torch.float64, torch.int64))
        is_async = choose.random() < 0.5
        if rank in of:
            generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
            given = (torch.rand(count * len(of), generator=generator) * 100).to(dtype)
            result = operation(given, group, of, root, op, is_async)
            results += result if rank == root or operation not in (reduce, gather) else []
    for group, of in groups[:-1]:
        if rank in of:
            dist.destroy_process_group(group)
    return results


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def all_reduce(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    finish(dist.all_reduce(given, op, group, is_async))
    return [given]


def reduce(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    finish(dist.reduce(given, root, op, group, is_async))
    return [given]


def broadcast(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    finish(dist.broadcast(given, root, group, is_async))
    return [given]


def all_gather(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    outputs = [torch.empty_like(given) for _ in of]
    finish(dist.all_gather(outputs, given, group, is_async))
    return outputs


def gather(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    outputs = [torch.empty_like(given) for _ in of] if dist.get_rank() == root else None
    finish(dist.gather(given, outputs, root, group, is_async))
    return outputs or []


def scatter(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    output = torch.empty_like(given.chunk(len(of))[0])
    parts = [each.clone() for each in given.view(len(of), -1)] if dist.get_rank() == root else None
    output = torch.empty(len(given) // len(of), dtype=given.dtype)
    finish(dist.scatter(output, parts, root, group, is_async))
    return [output]


def reduce_scatter(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    output = torch.empty(len(given) // len(of), dtype=given.dtype)
    finish(dist.reduce_scatter_tensor(output, given, op, group, is_async))
    return [output]


def all_to_all(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    output = torch.empty_like(given)
    finish(dist.all_to_all_single(output, given, group=group, async_op=is_async))
    return [output]


def messages(given: Any, group: Any, of: list[int], root: int, op: Any, is_async: bool) -> list[Any]:
    mine = of.index(dist.get_rank())
    if len(of) == 1:
        return []
    output = torch.empty_like(given)
    calls = [
        dist.P2POp(dist.isend, given, of[(mine + 1) % len(of)], group),
        dist.P2POp(dist.irecv, output, of[mine - 1], group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [output]


OPERATIONS = (
    *(all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, messages),
)


def compiled_sequence(seed: int) -> list[Any]:
    """Compile some random operations on two groups as one graph; return this rank's results."""
    choose, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    some = sorted(choose.sample(range(size), choose.randint(2, size)))
    groups = [(dist.group.WORLD, list(range(size))), (dist.new_group(some), some)]
    plan = [(choose.choice(COMPILED_OPERATIONS), *choose.choice(groups)) for _ in range(choose.randint(2, 6))]
    count = choose.choice((1, 5, 700))
    given = torch.rand(12 * count, generator=torch.Generator().manual_seed(100 * seed + rank))

    def apply_plan(x: Any) -> Any:
        for operation, group, of in plan:
            if rank in of:
                x = operation(x, group, len(of)) * 0.5 + 1
        return x

    torch._dynamo.reset()
    return [torch.compile(apply_plan, backend="aot_eager", fullgraph=True)(given)]


def summed(x: Any, group: Any, size: int) -> Any:
    return functions.all_reduce(x, "sum", group)


def summed_in_place(x: Any, group: Any, size: int) -> Any:
    y = x + 1
    dist.all_reduce(y, group=group)
    return y


def largest(x: Any, group: Any, size: int) -> Any:
    return functions.all_reduce(x, "max", group)


def gathered(x: Any, group: Any, size: int) -> Any:
    return functions.all_gather_tensor(x, 0, group).view(size, -1).mean(0)


def scattered(x: Any, group: Any, size: int) -> Any:
    return functions.reduce_scatter_tensor(x, "sum", 0, group).repeat(size)


def exchanged(x: Any, group: Any, size: int) -> Any:
    return functions.all_to_all_single(x, None, None, group)


COMPILED_OPERATIONS = (summed, summed_in_place, largest, gathered, scattered, exchanged)


def sequences_of(make: Callable[[int], list[Any]], seeds: range) -> list[Any]:
    return [make(seed) for seed in seeds]


def compare_sequences(
    folder: str, first: int, count: int, make: Callable[[int], list[Any]] = sequence
) -> None:
    results = with_each_backend(folder, sequences_of, make, range(first, first + count))
    for seed, (ours, theirs) in enumerate(zip(results["ronde"], results["gloo"]), first):
        try:
            close(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None


def test_random_sequences(tmp_path: Path) -> None:
    ranks.run(compare_sequences, 3, str(tmp_path), 0, 100)


@pytest.mark.slow
def test_a_thousand_random_sequences(tmp_path: Path) -> None:
    ranks.run(compare_sequences, 4, str(tmp_path), 1000, 1000, timeout_s=280)


def test_random_compiled_sequences(tmp_path: Path) -> None:
    ranks.run(compare_sequences, 3, str(tmp_path), 0, 3, compiled_sequence)


@pytest.mark.slow
def test_forty_random_compiled_sequences(tmp_path: Path) -> None:
    ranks.run(compare_sequences, 3, str(tmp_path), 1000, 40, compiled_sequence, timeout_s=280)
