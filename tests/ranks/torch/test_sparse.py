"""Sparse tensors: combined by every function that takes them, against the same computed dense and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def scattered(rank: int, dtype: Any = torch.float32, dense: tuple[int, ...] = (2,)) -> Any:
    """A 5 x 4 tensor with values where other ranks have some too, some twice, and elsewhere; rank 1 has none."""
    if rank == 1:
        return torch.sparse_coo_tensor(
            torch.empty(2, 0, dtype=torch.int64), torch.empty(0, *dense), (5, 4, *dense)
        ).to(dtype)
    positions = torch.tensor([[0, rank + 1, 4, 4], [3, 1, 2, 2]])
    values = (torch.arange(4.0) + 1 + rank).reshape(4, *[1] * len(dense)).expand(4, *dense)
    return torch.sparse_coo_tensor(positions, values, (5, 4, *dense)).to(dtype)


def total(size: int, **how: Any) -> Any:
    return sum(scattered(rank, **how).to_dense().double() for rank in range(size))


def same(result: Any, expected: Any, dtype: Any) -> None:
    assert result.is_sparse
    assert result.is_coalesced()
    assert result.dtype == dtype
    torch.testing.assert_close(result.to_dense(), expected.to(dtype), rtol=0, atol=0)
    result.coalesce().indices()  # in the right order: a second coalesce finds nothing to do


def types(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32):
        for dense in ((), (2,), (2, 3)):
            mine = scattered(rank, dtype, dense)
            expected = total(size, dtype=dtype, dense=dense)
            same(hvd.allreduce(mine, op=hvd.Sum), expected, dtype)
            mean = expected / size if dtype.is_floating_point else (expected / size).trunc()
            same(hvd.synchronize(hvd.sparse_allreduce_async(mine, "mean", hvd.Average)), mean, dtype)


def forms(rank: int, size: int) -> None:
    expected = total(size)
    handle = hvd.sparse_allreduce_async(scattered(rank), name="called", op=hvd.Sum)
    same(handle(), expected, torch.float32)  # as Horovod's own scripts do
    assert hvd.poll(handle)
    same(hvd.synchronize(handle), expected, torch.float32)
    same(hvd.synchronize(hvd.allreduce_async(scattered(rank), op=hvd.Sum)), expected, torch.float32)
    same(hvd.allreduce(scattered(rank), name="mean"), expected / size, torch.float32)
    for change in (hvd.allreduce_, lambda x, **how: hvd.synchronize(hvd.allreduce_async_(x, **how))):
        mine = scattered(rank)
        assert change(mine, name="in place", op=hvd.Sum) is mine
        same(mine, expected, torch.float32)
    one, other = hvd.grouped_allreduce([scattered(rank), torch.ones(2)], op=hvd.Sum)
    same(one, expected, torch.float32)
    assert other.tolist() == [size, size]
    scaled = hvd.allreduce(scattered(rank), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(scaled, expected * 2, torch.float32)
    whole = hvd.allreduce(torch.tensor([2**59 + 1, 7]).to_sparse(), op=hvd.Average, prescale_factor=2.0)
    assert whole.to_dense().tolist() == [2**60 + 2, 14]
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        same(hvd.allreduce(scattered(rank), op=hvd.Sum, compression=compression), expected, torch.float32)


def mistakes(rank: int, size: int) -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match=f"sparse tensor cannot be reduced with op={op.name}"):
            hvd.allreduce(scattered(rank), op=op)
    with pytest.raises(ValueError, match="sparse_csr"):
        hvd.sparse_allreduce_async(torch.eye(3).to_sparse_csr(), "rows", hvd.Sum)
    if size == 1:
        return
    with pytest.raises(ronde.MismatchError, match=r"'shape' .* \(4, 4\) on rank 0 and \(5, 4\) on rank 1"):
        hvd.allreduce(torch.eye(4 + min(rank, 1), 4).to_sparse(), name="shape")
    with pytest.raises(ronde.MismatchError, match="type"):
        hvd.allreduce(torch.eye(3, dtype=torch.float64 if rank else torch.float32).to_sparse(), name="type")
    with pytest.raises(ronde.MismatchError, match="layout"):  # rather than waiting for ever
        hvd.allreduce(torch.eye(3).to_sparse() if rank else torch.eye(3), name="layout")
    same(hvd.allreduce(scattered(rank), name="shape", op=hvd.Sum), total(size), torch.float32)


OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
    lambda weights: torch.optim.SGD(weights, lr=0.5),
    lambda weights: torch.optim.SparseAdam(list(weights), lr=0.05),
    lambda weights: torch.optim.Adagrad(weights, lr=0.05),
)


def trained(rank: int, size: int) -> None:
    """Embeddings by every kind of optimizer that takes sparse gradients, against one process with all words."""
    for sparse_as_dense in (False, True):
        for dtype in (torch.float64, torch.bfloat16):
            for make in OPTIMIZERS:
                torch.manual_seed(0)
                table = torch.nn.Embedding(9, 4, sparse=True).to(dtype)
                alone = torch.nn.Embedding(9, 4, sparse=True).double()
                alone.load_state_dict(table.state_dict())
                optimizer = hvd.DistributedOptimizer(
                    make(table.parameters()), table.named_parameters(), sparse_as_dense=sparse_as_dense
                )
                expected = make(alone.parameters())
                for step in range(3):
                    words = (torch.arange(6) * (step + 2)) % 7
                    optimizer.zero_grad()
                    expected.zero_grad()
                    table(torch.tensor_split(words, size)[rank]).pow(2).sum().backward()
                    (alone(words).pow(2).sum() / size).backward()
                    optimizer.step()
                    expected.step()
                    assert table.weight.grad.is_sparse
                close = dict() if dtype == torch.float64 else dict(rtol=0.05, atol=0.05)
                torch.testing.assert_close(table.weight.double(), alone.weight, **close)


CHECKS = (types, forms, trained, mistakes)


def sparse() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 3])
def test_sparse(n: int) -> None:
    ranks.run(sparse, n)
