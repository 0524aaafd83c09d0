"""Uneven numbers of batches: ranks that run out contribute zeros, and all meet again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.ranks.torch.training import agree, batch, loss_of, network, sgd

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def batch_of(rank: int, step: int) -> tuple[Any, Any]:
    return batch(100 * rank + step)


def counts(size: int, epoch: int) -> list[int]:
    """How many batches each rank has: the first has least, and in the next epoch most."""
    steps = [2 + 2 * rank for rank in range(size)]
    return steps if epoch % 2 == 0 else steps[::-1]


def train_to_the_end(model: Any, optimizer: Any, rank: int, size: int, epochs: int) -> list[int]:
    lasts = []
    for epoch in range(epochs):
        for step in range(counts(size, epoch)[rank]):
            images, labels = batch_of(rank, step)
            optimizer.zero_grad()
            loss_of(model, images, labels).backward()
            optimizer.step()
        last = hvd.join()
        lasts.append(last)
        # Ranks that ran out have not made the last updates.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    return lasts


def train_alone(model: Any, make: Callable[[Any], Any], size: int, epochs: int, is_of_all: bool) -> None:
    """The same in one process: the mean over all ranks, or over those that have a batch."""
    optimizer = make(model)
    for epoch in range(epochs):
        steps = counts(size, epoch)
        for step in range(max(steps)):
            there = [rank for rank in range(size) if step < steps[rank]]
            optimizer.zero_grad()
            for rank in there:
                loss = loss_of(model, *batch_of(rank, step))
                (loss / (size if is_of_all else len(there))).backward()
            optimizer.step()


def uneven(average: str) -> list[list[int]]:
    torch.set_num_threads(1)
    hvd.init(join_average=average)
    rank, size = hvd.rank(), hvd.size()
    start, expected = network(), network()
    train_alone(expected, sgd, size, 2, average == "all")
    lasts = []
    for how in (
        dict(),  # in symmetric memory, small gradients in a bucket
        dict(symmetric_gradients=False),
        dict(groups=2),
    ):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **how)
        if not how:
            [bucket] = optimizer._buckets  # on every rank the same, as all know the parameters
            assert bucket is not None
        lasts.append(train_to_the_end(model, optimizer, rank, size, 2))
        agree(model, expected)
    hvd.shutdown()
    return lasts


@pytest.mark.parametrize(("n", "average"), [(3, "all"), (2, "contributing")])
def test_uneven_numbers_of_batches(n: int, average: str) -> None:
    answers = ranks.run(uneven, n, average)
    assert answers == [[[n - 1, 0]] * 3] * n


def every_kind(average: str) -> None:
    """What the others get of operations in which a rank has no part any more."""
    hvd.init(join_average=average)
    rank, size = hvd.rank(), hvd.size()
    contributors = size if average == "all" else size - 1
    assert hvd.join(device=-1) in range(size)  # all of them, at once
    if rank != 0:
        total = float(sum(range(1, size)))
        x = torch.full((2, 3), float(rank))
        table = torch.eye(3).to_sparse() * rank
        for _ in range(2):
            assert (hvd.allreduce(x, name="mean") == total / contributors).all()
            group = hvd.grouped_allreduce([x, table, -x], name="group")
            assert (group[0] == total / contributors).all()
            torch.testing.assert_close(group[1].to_dense(), torch.eye(3) * total / contributors)
            torch.testing.assert_close(
                hvd.allreduce(table, name="table", op=hvd.Sum).to_dense(), torch.eye(3) * total
            )
            assert hvd.allgather_object({"rank": rank}, name="objects") == [
                {"rank": other} for other in range(1, size)
            ]
            assert hvd.broadcast_object(rank, root_rank=1, name="object") == 1
            leaf = torch.ones(rank, 2, requires_grad=True)
            (hvd.allgather(leaf, name="rows") * rank).sum().backward()
            torch.testing.assert_close(leaf.grad, torch.full((rank, 2), total / contributors))
            layer = hvd.SyncBatchNorm(3)
            alone = torch.nn.BatchNorm1d(3)
            rows = [torch.arange(6.0).reshape(2, 3).roll(other, 0) * other for other in range(1, size)]
            torch.testing.assert_close(layer(rows[rank - 1]), alone(torch.cat(rows))[2 * rank - 2 : 2 * rank])
        with pytest.raises(ronde.MismatchError, match="the root of the broadcast, rank 0, has joined"):
            hvd.broadcast(x, root_rank=0, name="from nobody")
        with pytest.raises(ronde.MismatchError, match=r"'shapes' .* on rank 1 and .* on rank 2"):
            hvd.allreduce(torch.eye(rank + 1, 4).to_sparse(), name="shapes")
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()


def both_averages() -> None:
    for average in ("all", "contributing"):
        every_kind(average)


def test_what_the_others_get() -> None:
    ranks.run(both_averages, 3)
