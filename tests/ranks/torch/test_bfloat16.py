"""bfloat16 is a type like any other: in every operation and form, in autograd, in the optimizer.

Numbers are such that bfloat16 holds all results exactly, unless the test is about rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.ranks.torch.training import agree, batch, loss_of, mine, network, sgd, train_alone

from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

BF16 = torch.bfloat16


def numbers(rank: int, rows: int = 6) -> Any:
    return ((torch.arange(4 * rows).reshape(rows, 4) % 5) * 4 + rank).to(BF16)


def same(result: Any, expected: Any) -> None:
    assert result.dtype == BF16
    assert torch.equal(result, expected.to(BF16)), (result, expected)


def share(x: Any, rank: int, size: int) -> Any:
    return torch.tensor_split(x, size)[rank]


def forms(rank: int, size: int) -> None:
    every = [numbers(each) for each in range(size)]
    total, stacked = sum(x.float() for x in every), torch.stack(every).float()
    x = numbers(rank)
    for op, expected in (
        (hvd.Sum, total),
        (hvd.Average, total / size),
        (hvd.Min, stacked.amin(0)),
        (hvd.Max, stacked.amax(0)),
        (hvd.Product, stacked.prod(0)),
    ):
        same(hvd.allreduce(x, op=op), expected)
        same(hvd.synchronize(hvd.allreduce_async(x, op=op)), expected)
        same(hvd.allreduce_(x.clone(), op=op), expected)
        same(hvd.synchronize(hvd.allreduce_async_(x.clone(), op=op)), expected)
        same(hvd.grouped_allreduce([x, x.t()], op=op)[1], expected.t())
        same(hvd.grouped_allreduce_([x.clone()], op=op)[0], expected)
        same(hvd.reducescatter(x, op=op), share(expected, rank, size))
        same(hvd.synchronize(hvd.reducescatter_async(x, op=op)), share(expected, rank, size))
        same(hvd.grouped_reducescatter([x], op=op)[0], share(expected, rank, size))
    same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), total * 2)
    uneven = [numbers(each, rows=each + 1) for each in range(size)]
    same(hvd.allgather(uneven[rank]), torch.cat(uneven))
    same(hvd.synchronize(hvd.allgather_async(uneven[rank])), torch.cat(uneven))
    same(hvd.grouped_allgather([x])[0], torch.cat(every))
    for root in range(size):
        same(hvd.broadcast(x, root), every[root])
        same(hvd.broadcast_(x.clone(), root), every[root])
        same(hvd.synchronize(hvd.broadcast_async(x, root)), every[root])
        same(hvd.synchronize(hvd.broadcast_async_(x.clone(), root)), every[root])
    splits = [6 // size] * size
    parts = torch.cat([share(x[: sum(splits)], rank, size) for x in every])
    received, counts = hvd.alltoall(x[: sum(splits)], splits=splits)
    same(received, parts)
    assert counts.tolist() == splits
    same(hvd.synchronize(hvd.alltoall_async(x[: sum(splits)]))[0], parts)
    same(x, numbers(rank))


def rounding(rank: int, size: int) -> None:
    """Sums are formed in float32 and rounded once: 256 + 1 + 1 is 258, though 256 + 1 alone would be 256."""
    x = torch.tensor([256.0 if rank == 0 else 1.0], dtype=BF16)
    same(hvd.allreduce(x, op=hvd.Sum), torch.tensor([255.0 + size]))
    large = x.expand(300_000).contiguous()  # too much for one window of staging
    same(hvd.allreduce(large, op=hvd.Sum), torch.tensor([255.0 + size]).expand(300_000))
    sparse = hvd.allreduce(x.to_sparse(), op=hvd.Sum)
    same(sparse.to_dense(), torch.tensor([255.0 + size]))


def gradients(rank: int, size: int) -> None:
    def gradient(function: Callable[..., Any], *words: Any, **how: Any) -> Any:
        x = numbers(rank).requires_grad_()
        (function(x, *words, **how) * 3).sum().backward()
        return x.grad

    ones = torch.ones(6, 4)
    same(gradient(hvd.allreduce, op=hvd.Sum), 3 * size * ones)
    same(gradient(lambda x: hvd.grouped_allreduce([x])[0]), 3 * ones)
    same(gradient(hvd.allgather), 3 * ones)
    same(gradient(hvd.broadcast, root_rank=0), 3 * ones if rank == 0 else 0 * ones)
    same(gradient(hvd.alltoall), 3 * ones)
    same(gradient(hvd.reducescatter, op=hvd.Sum), 3 * size * ones)


def from_rank_to_rank(rank: int, size: int) -> None:
    """Parameters, the state of an optimizer, objects; and values that compression leaves as they are."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2).to(BF16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for told in (model.weight.data, optimizer.state[model.weight]["exp_avg"]):
        for other in hvd.allgather_object(told):
            same(told, other)
    total = sum(numbers(each).float() for each in range(size))
    for compression in (hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.fp16):
        same(hvd.allreduce(numbers(rank), op=hvd.Sum, compression=compression), total)


def trained(rank: int, size: int) -> None:
    """Parameters of bfloat16, with gradients where ranks share memory, where they do not, compressed and in groups."""
    expected = network()
    train_alone(expected, sgd, steps=2)
    for how in (
        dict(),
        dict(symmetric_gradients=False),
        dict(compression=hvd.Compression.bf16),
        dict(compression=hvd.Compression.fp16),
        dict(groups=2, backward_passes_per_step=1),
    ):
        model = network().to(BF16)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **how)
        for step in range(2):
            images, labels = batch(step)
            optimizer.zero_grad()
            loss_of(model, mine(images).to(BF16), mine(labels)).backward()
            optimizer.step()
        assert all(each.grad is None or each.grad.dtype == BF16 for each in model.parameters())
        agree(model.double(), expected, rtol=0.1, atol=0.05)


CHECKS = (forms, rounding, gradients, from_rank_to_rank, trained)


def bfloat16() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


def test_bfloat16() -> None:
    ranks.run(bfloat16, 3)


def over_tcp() -> None:
    torch.set_num_threads(1)
    hvd.init()
    forms(hvd.rank(), hvd.size())
    hvd.shutdown()


def test_bfloat16_by_tcp() -> None:
    ranks.run(over_tcp, 2, environ={"RONDE_TRANSPORT": "tcp"})
