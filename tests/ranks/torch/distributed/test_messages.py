"""Messages between two ranks: tags in any order, receives from any rank, batches, several groups at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.torch.distributed.groups import default_group, same

from ronde.testing import ranks


def tags(rank: int, size: int) -> None:
    """The receiver takes messages by tag, not in the order in which they were sent."""
    count = 20
    if rank == 0:
        works = [dist.isend(torch.full((tag * 5000,), float(tag)), 1, tag=tag) for tag in range(count)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in reversed(range(count)):
            result = torch.empty(tag * 5000)
            assert dist.recv(result, 0, tag=tag) == 0
            same(result, torch.full((tag * 5000,), float(tag)))


def in_order(rank: int, size: int) -> None:
    """Messages of one tag arrive in the order in which they were sent."""
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.tensor([rank, each]), ahead) for each in range(30)]
    results = [torch.empty(2, dtype=torch.int64) for _ in range(30)]
    works += [dist.irecv(result, behind) for result in results]
    for work in works:
        work.wait()
    same(results, [torch.tensor([behind, each]) for each in range(30)])


def from_any(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=7)
        return
    seen = set()
    for _ in range(size - 1):
        result = torch.empty(1)
        source = dist.recv(result, tag=7)
        assert result.item() == source
        seen.add(source)
    assert seen == set(range(1, size))


def beside_collectives(rank: int, size: int) -> None:
    """A message has no order with collectives."""
    result = torch.empty(3)
    work = dist.irecv(result, (rank - 1) % size, tag=3)
    total = torch.ones(2)
    dist.all_reduce(total)
    dist.send(torch.full((3,), float(rank)), (rank + 1) % size, tag=3)
    dist.all_reduce(total)
    work.wait()
    same(result, torch.full((3,), float((rank - 1) % size)))
    same(total, torch.full((2,), float(size * size)))


def batches(rank: int, size: int) -> None:
    """Every rank sends to all before it receives: large messages and small ones."""
    for count in (0, 1, 1000, 500_000):
        results = [torch.empty(count) for _ in range(size)]
        calls = [
            dist.P2POp(dist.isend, torch.full((count,), float(rank)), other)
            for other in range(size)
            if other != rank
        ]
        calls += [
            dist.P2POp(dist.irecv, results[other], other) for other in reversed(range(size)) if other != rank
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        same([results[other] for other in range(size) if other != rank], [
            torch.full((count,), float(other)) for other in range(size) if other != rank
        ])  # fmt: skip


def kinds(rank: int, size: int) -> None:
    """Tensors of any dtype and form, and a receive into a tensor with gaps."""
    grid = torch.arange(12.0).view(3, 4)
    for given in (grid.t(), grid.bool(), grid.to(torch.complex64), grid[0, 0], grid[:0], grid[:, ::2]):
        if rank == 0:
            dist.send(given, 1)
        elif rank == 1:
            result = torch.zeros_like(given)
            dist.recv(result, 0)
            same(result, given)
    if rank == 0:
        dist.send(grid[:, :2], 1)
    elif rank == 1:
        result = torch.zeros(3, 4)
        dist.recv(result[:, 1:3], 0)
        same(result[:, 1:3], grid[:, :2])
        assert not result[:, 0].any()
        assert not result[:, 3].any()


def in_groups(rank: int, size: int) -> None:
    """What is sent in one group does not arrive in another, though with the same tag."""
    group = dist.new_group([1, 0])
    if rank == 0:
        works = [
            dist.isend(torch.tensor([1.0]), 1, group=None),
            dist.isend(torch.tensor([2.0]), 1, group=group),
        ]
        for work in works:
            work.wait()
    elif rank == 1:
        for expected, where in ((2.0, group), (1.0, None)):
            result = torch.empty(1)
            dist.recv(result, 0, group=where)
            assert result.item() == expected
    if rank == 0:
        dist.send(torch.tensor([3.0]), 1, group=group)
    elif rank == 1:
        result = torch.empty(1)
        assert dist.recv(result, group=group) == 0
    dist.barrier()


def futures(rank: int, size: int) -> None:
    result = torch.empty(2)
    work = dist.irecv(result, (rank - 1) % size)
    future = work.get_future()
    assert not work.is_completed()
    dist.barrier()
    dist.send(torch.full((2,), float(rank)), (rank + 1) % size)
    same(future.wait()[0], torch.full((2,), float((rank - 1) % size)))
    assert work.is_completed()
    assert work.is_success()


def wrong_length(rank: int, size: int) -> None:
    """A message that does not fit is an error of the receive that names both sizes. The next ones work."""
    if rank == 0:
        work = dist.isend(torch.ones(5), 1)
        try:
            work.wait()
        except RuntimeError:
            pass
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        with pytest.raises(RuntimeError, match=r"20.*12|12.*20"):
            dist.recv(torch.empty(3), 0)
        dist.recv(torch.empty(1), 0)


CHECKS: Any = (tags, in_order, from_any, beside_collectives, batches, kinds, in_groups, futures, wrong_length)


def messages(folder: str) -> None:
    with default_group(folder) as (rank, size):
        for check in CHECKS:
            check(rank, size)
            dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_messages(size: int, tmp_path: Path) -> None:
    ranks.run(messages, size, str(tmp_path))


def test_messages_by_tcp(tmp_path: Path) -> None:
    ranks.run(messages, 3, str(tmp_path), environ={"RONDE_TRANSPORT": "tcp"})
