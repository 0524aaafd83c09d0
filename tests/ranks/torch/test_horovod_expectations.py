"""`ronde.torch` where programs for Horovod rely on details: classes of errors, texts, gradients of a new optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def errors(rank: int, size: int) -> None:
    """Each is of the class that Horovod raises, says what is wrong, and is known before anything is sent."""
    with pytest.raises(ValueError, match=f"splits needs {size} whole numbers"):
        hvd.alltoall(torch.zeros(size), torch.ones(size))
    for tensor in (torch.zeros(size), torch.zeros(size, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="only allreduce has it"):
            hvd.reducescatter(tensor, op=hvd.Adasum)
    with pytest.raises(RuntimeError, match="0-d array has none"):
        hvd.reducescatter(torch.tensor(1.0))
    no_gradient = torch.nn.Linear(2, 2).weight.grad
    for call in (
        hvd.allreduce,
        hvd.allreduce_async_,
        hvd.allgather,
        hvd.allgather_async,
        hvd.alltoall,
        hvd.alltoall_async,
        hvd.reducescatter,
        hvd.reducescatter_async,
        hvd.sparse_allreduce_async,
        lambda given: hvd.broadcast(given, 0),
        lambda given: hvd.broadcast_async_(given, 0),
        lambda given: hvd.grouped_allreduce([torch.zeros(2), given]),
        lambda given: hvd.grouped_allreduce_async_([torch.zeros(2), given]),
        lambda given: hvd.grouped_allgather_async([given]),
        lambda given: hvd.allreduce(given, compression=hvd.Compression.fp16),
    ):
        with pytest.raises(ValueError, match="gradient None until its first backward pass"):
            call(no_gradient)
        with pytest.raises(ValueError, match=r"expected a tensor, not 3\.0"):
            call(3.0)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


def gradients_of_a_new_optimizer(rank: int, size: int) -> None:
    for distribute in (lambda it: it, hvd.DistributedOptimizer):
        model = torch.nn.Module()
        model.frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
        model.linear = torch.nn.Linear(3, 2)
        model.words = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = distribute(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert model.frozen.grad is None
        assert model.words.weight.grad.is_sparse
        for parameter in (model.linear.weight, model.linear.bias, model.words.weight):
            gradient = parameter.grad.to_dense()
            assert gradient.shape == parameter.shape
            assert not gradient.any()
        kept = hvd.broadcast(model.linear.weight.grad, root_rank=0)
        assert not kept.any()
        model.linear.weight.grad += 1  # what there is stays
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert model.linear.weight.grad.min() == 1


def what_programs_look_at(rank: int, size: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for op in (hvd.Average, hvd.Adasum)[: 2 if size in (1, 2, 4) else 1]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
        assert optimizer._parameter_names == names
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(set(optimizer._parameter_names.values())) == 4
    halved = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        compression=hvd.Compression.fp16,
        op=hvd.Sum,
        symmetric_gradients=False,
    )
    for value, reduced in ((None, 0.0), (rank + 1.0, size * (size + 1) / 2)):
        model[0].bias.grad = None if value is None else torch.full((2,), value)
        handle, context = halved._allreduce_grad_async(model[0].bias)
        result = hvd.Compression.fp16.decompress(hvd.synchronize(handle), context)
        assert result.dtype == torch.float32
        assert result.tolist() == [reduced] * 2
    halved.zero_grad()
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.synchronize()
    # Programs filter this warning by its text.
    with pytest.warns(
        UserWarning, match=r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"
    ):
        optimizer.step()


def errors_of_synchronize(rank: int, size: int) -> None:
    """Whatever fails in `synchronize` is a HorovodInternalError, as its scripts catch it; and keeps its own class."""
    if size == 1:
        return
    calls: list[Callable[[], object]] = [
        lambda: hvd.allreduce(torch.ones(2 + rank), name="shapes"),
        lambda: hvd.synchronize(hvd.allgather_async(torch.ones(2, 2 + rank), name="rows")),
        lambda: hvd.broadcast(torch.ones(2), root_rank=rank, name="roots"),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async_([torch.ones(2)] * (1 + rank), name="groups")),
        lambda: hvd.synchronize(
            hvd.sparse_allreduce_async(torch.ones(2, 2 + rank).to_sparse(), name="sparse", op=hvd.Sum)
        ),
    ]
    for call in calls:
        with pytest.raises(hvd.HorovodInternalError, match="rank") as caught:
            call()
        assert isinstance(caught.value, ronde.MismatchError)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


def loss_of_a_rank() -> str:
    hvd.init()
    if hvd.rank() == 1:
        hvd.shutdown()
        return ""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(2), name="lonely")
    return type(caught.value).__name__


def test_the_loss_of_a_rank_is_a_horovod_internal_error() -> None:
    assert ranks.run(loss_of_a_rank, 2) == ["PeerLostError", ""]


def expectations() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in (errors, gradients_of_a_new_optimizer, what_programs_look_at, errors_of_synchronize):
        check(hvd.rank(), hvd.size())
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2])
def test_what_programs_for_horovod_rely_on(n: int) -> None:
    ranks.run(expectations, n)
