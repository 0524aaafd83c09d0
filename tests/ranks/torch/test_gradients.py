"""Autograd through the operations of `ronde.torch`: the gradients are those of `horovod.torch`."""

from __future__ import annotations

from typing import Any

import pytest

from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def leaf(rank: int, rows: int = 4) -> Any:
    return (torch.arange(2.0 * rows, dtype=torch.float64).reshape(rows, 2) + rank).requires_grad_()


def weights(rank: int, like: Any) -> Any:
    """What the rank's loss multiplies the result with, so that it is the gradient that arrives: like no other's."""
    return torch.arange(1.0, like.numel() + 1, dtype=torch.float64).reshape(like.shape) * (rank + 1)


def back(result: Any, rank: int) -> None:
    assert result.requires_grad
    (result * weights(rank, result)).sum().backward()


def same(gradient: Any, expected: Any) -> None:
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def through_allreduce(rank: int, size: int) -> None:
    total = sum(weights(other, leaf(0)) for other in range(size))
    for how, expected in (
        (dict(op=hvd.Sum), total),
        (dict(), total / size),
        (dict(op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5), total * 1.5),
        (dict(name="named", prescale_factor=2.0), total * 2 / size),
        (dict(op=hvd.Sum, compression=hvd.Compression.bf16), total),
    ):
        x = leaf(rank)
        back(hvd.allreduce(x, **how), rank)
        same(x.grad, expected)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            hvd.allreduce(leaf(rank), op=op).sum().backward()
    with torch.no_grad():
        assert not hvd.allreduce(leaf(rank)).requires_grad


def through_groups(rank: int, size: int) -> None:
    x, y, fixed = leaf(rank), leaf(rank, rows=1), torch.ones(3)
    first, second, third = hvd.grouped_allreduce([x, y, fixed], name="group", op=hvd.Sum)
    (first.sum() * (rank + 1) + second.sum()).backward()
    same(x.grad, torch.full_like(x, size * (size + 1) / 2))
    same(y.grad, torch.full_like(y, size))
    assert torch.equal(third, fixed * size)
    x, y = leaf(rank, rows=rank + 1), leaf(rank)
    joined = hvd.grouped_allgather([x, y])
    (joined[0].sum() + 2 * joined[1].sum()).backward()
    same(x.grad, torch.ones_like(x))
    same(y.grad, torch.full_like(y, 2))
    x, y = leaf(rank), leaf(rank, rows=5)
    parts = hvd.grouped_reducescatter([x, y])
    (parts[0].sum() + 2 * parts[1].sum()).backward()
    same(x.grad, torch.ones_like(x))
    same(y.grad, torch.full_like(y, 2))


def through_allgather(rank: int, size: int) -> None:
    for name in (None, "rows"):
        x = leaf(rank, rows=rank + 1)
        joined = hvd.allgather(x, name=name)
        back(joined, rank)
        mean = sum(weights(other, joined) for other in range(size)) / size
        start = rank * (rank + 1) // 2
        same(x.grad, mean[start : start + rank + 1])
    scalar = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    back(hvd.allgather(scalar), rank)
    same(scalar.grad, torch.tensor((rank + 1) * (size + 1) / 2, dtype=torch.float64))


def through_broadcast(rank: int, size: int) -> None:
    for root in range(size):
        x = leaf(rank)
        back(hvd.broadcast(x, root), rank)
        mean = weights(0, x) * (size + 1) / 2
        same(x.grad, mean if rank == root else torch.zeros_like(x))


def through_alltoall(rank: int, size: int) -> None:
    splits = [rank + destination for destination in range(size)]
    x = leaf(rank, rows=sum(splits))
    result, received = hvd.alltoall(x, splits=splits, name="exchange")
    assert not received.requires_grad
    back(result, rank)
    # What came back is what each rank multiplied its part of the rows with.
    parts = []
    for other in range(size):
        counts = [source + other for source in range(size)]
        all_weights = weights(other, torch.empty(sum(counts), 2))
        parts.append(all_weights[sum(counts[:rank]) : sum(counts[: rank + 1])])
    same(x.grad, torch.cat(parts))
    x = leaf(rank, rows=size)
    hvd.alltoall(x).sum().backward()
    same(x.grad, torch.ones_like(x))


def through_reducescatter(rank: int, size: int) -> None:
    rows = 5
    counts = [rows // size + (other < rows % size) for other in range(size)]
    joined = torch.cat([weights(other, torch.empty(counts[other], 2)) for other in range(size)])
    for how, expected in (
        (dict(), joined),
        (dict(op=hvd.Sum), joined * size),
        (dict(name="rows", prescale_factor=0.5, postscale_factor=3.0), joined * 1.5),
        (dict(op=hvd.Sum, prescale_factor=0.5), joined * size / 2),
    ):
        x = leaf(rank, rows)
        back(hvd.reducescatter(x, **how), rank)
        same(x.grad, expected)
    with pytest.raises(NotImplementedError, match="reducescatter with op=Max has no gradient"):
        hvd.reducescatter(leaf(rank), op=hvd.Max).sum().backward()


def twice(rank: int, size: int) -> None:
    """The gradient of a gradient: autograd goes through the backward operations, too."""
    x = leaf(rank)
    (gradient,) = torch.autograd.grad((hvd.allreduce(x, op=hvd.Sum) ** 2).sum(), x, create_graph=True)
    same(gradient, 2 * size * sum(leaf(other) for other in range(size)).detach())
    gradient.sum().backward()
    same(x.grad, torch.full_like(x, 2.0 * size * size))


CHECKS = (
    through_allreduce,
    through_groups,
    through_allgather,
    through_broadcast,
    through_alltoall,
    through_reducescatter,
    twice,
)


def gradients() -> None:
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients(n: int) -> None:
    ranks.run(gradients, n)
