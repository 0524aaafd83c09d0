"""Process sets in `ronde.torch`: operations and the optimizer among some ranks, with roots that are the world's."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.ranks.torch.training import STEPS, batch, loss_of, network, sgd

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def same(result: Any, expected: Any) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def operations(mine: Any, rank: int) -> None:
    """Each in its forms, with names that both sets use."""
    ours, how = mine.ranks, dict(process_set=mine)
    x, total = torch.full((4, 3), float(rank)), torch.full((4, 3), float(sum(ours)))
    for name in ("x", None):
        same(hvd.allreduce(x, name=name, **how), total / 2)
        same(hvd.allreduce_(x.clone(), name=name, op=hvd.Sum, **how), total)
        same(hvd.synchronize(hvd.allreduce_async(x, name=name, op=hvd.Sum, **how)), total)
        same(hvd.synchronize(hvd.allreduce_async_(x.clone(), name=name, **how)), total / 2)
        same(hvd.grouped_allreduce([x, x.int()], name=name, op=hvd.Sum, **how), [total, total.int()])
        same(hvd.grouped_allreduce_([x.clone()], name=name, **how), [total / 2])
        same(hvd.synchronize(hvd.grouped_allreduce_async([x], name=name, **how)), [total / 2])
        same(hvd.synchronize(hvd.grouped_allreduce_async_([x.clone()], name=name, **how)), [total / 2])
        same(hvd.allgather(x[:1, 0], name=name, **how), torch.tensor(ours).float())
        same(hvd.synchronize(hvd.allgather_async(x[:1, 0], name=name, **how)), torch.tensor(ours).float())
        same(hvd.grouped_allgather([x[:1, 0]], name=name, **how), [torch.tensor(ours).float()])
        gathering = hvd.grouped_allgather_async([x[:1, 0]], name=name, **how)
        same(hvd.synchronize(gathering), [torch.tensor(ours).float()])
        same(hvd.reducescatter(x, name=name, op=hvd.Sum, **how), total[:2])
        same(hvd.synchronize(hvd.reducescatter_async(x, name=name, **how)), total[:2] / 2)
        same(hvd.grouped_reducescatter([x], name=name, **how), [total[:2] / 2])
        same(hvd.synchronize(hvd.grouped_reducescatter_async([x], name=name, **how)), [total[:2] / 2])
        rows, received = hvd.alltoall(x, splits=torch.tensor([1, 3]), name=name, **how)
        assert received.tolist() == [1 + 2 * mine.rank()] * 2
        assert rows[:, 0].tolist() == [float(other) for other in ours for _ in range(1 + 2 * mine.rank())]
        assert len(hvd.synchronize(hvd.alltoall_async(x, name=name, **how))[0]) == 4
        root = ours[-1]  # of the world
        same(hvd.broadcast(x, root, name=name, **how), torch.full((4, 3), float(root)))
        same(hvd.broadcast_(x.clone(), root, name=name, **how), torch.full((4, 3), float(root)))
        same(hvd.synchronize(hvd.broadcast_async(x, root, name, **how)), torch.full((4, 3), float(root)))
        same(hvd.synchronize(hvd.broadcast_async_(x.clone(), root, name, **how))[0, 0].item(), float(root))
        table = (torch.eye(3) * rank).to_sparse()
        mean = torch.eye(3) * sum(ours) / 2
        same(hvd.synchronize(hvd.sparse_allreduce_async(table, name, hvd.Average, **how)).to_dense(), mean)
    hvd.barrier(**how)
    assert hvd.allgather_object(rank, **how) == ours
    assert hvd.broadcast_object({"from": rank}, root_rank=root, **how) == {"from": root}
    weights = {"weights": x.clone()}
    hvd.broadcast_parameters(weights, root, **how)
    same(weights["weights"], torch.full((4, 3), float(root)))


def gradients_of_operations(mine: Any, rank: int) -> None:
    ours, how = mine.ranks, dict(process_set=mine)

    def gradient(operation: Any, rows: int = 2) -> Any:
        leaf = torch.ones(rows, 2, requires_grad=True)
        (operation(leaf) * (rank + 1)).sum().backward()
        return leaf.grad

    ones, total = torch.ones(2, 2), float(sum(ours) + 2)
    same(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, **how)), ones * total)
    same(gradient(lambda x: hvd.grouped_allreduce([x], **how)[0]), ones * total / 2)
    same(gradient(lambda x: hvd.allgather(x, **how), rows=rank + 1), torch.ones(rank + 1, 2) * total / 2)
    wanted = ones * total / 2 if rank == ours[1] else torch.zeros(2, 2)
    same(gradient(lambda x: hvd.broadcast(x, ours[1], **how)), wanted)
    same(gradient(lambda x: hvd.alltoall(x, **how))[:, 0], torch.tensor(ours) + 1.0)
    same(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum, **how))[:, 0], (torch.tensor(ours) + 1.0) * 2)


def refusals(mine: Any, other: Any, rank: int) -> None:
    """Calls from outside."""
    x, outside = torch.ones(4), dict(process_set=other)
    stranger = re.escape(f"rank {rank} is not in the process set of ranks {other.ranks}")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: hvd.allreduce(x, **outside),
        lambda: hvd.allreduce_async_(x, **outside),
        lambda: hvd.grouped_allreduce([x], **outside),
        lambda: hvd.grouped_allgather([x], **outside),
        lambda: hvd.broadcast(x, other.ranks[0], **outside),
        lambda: hvd.alltoall(x, **outside),
        lambda: hvd.barrier(**outside),
        lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "table", hvd.Sum, **outside),
        lambda: hvd.broadcast_parameters({"x": x}, other.ranks[0], **outside),
        lambda: hvd.broadcast_object(x, other.ranks[0], **outside),
        lambda: hvd.allgather_object(x, **outside),
        lambda: hvd.SyncBatchNorm(2, **outside)(torch.ones(3, 2)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=stranger):
            call()
    with pytest.raises(ValueError, match=f"rank {other.ranks[0]} is not in the process set of"):
        hvd.broadcast(x, other.ranks[0], process_set=mine)
    with pytest.raises(ValueError, match="process_set must be a ProcessSet, not 1"):
        hvd.allreduce(x, process_set=1)
    with pytest.raises(ValueError, match="is not added"):
        hvd.allreduce(x, process_set=hvd.ProcessSet([0, 1]))


def training(mine: Any, other: Any, rank: int) -> None:
    """Each set trains a model of its own, against the same alone; the other set's optimizer is a plain one here."""
    for how in (dict(), dict(groups=2), dict(op=hvd.Sum)):
        model, expected = network(), network()
        if mine.rank() == 1:
            with torch.no_grad():
                model.scale.add_(1)  # to be broadcast over
        root = mine.ranks[0]
        hvd.broadcast_parameters(model.state_dict(), root, process_set=mine)
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), process_set=mine, gradient_predivide_factor=1.0, **how
        )
        hvd.broadcast_optimizer_state(optimizer, root, process_set=mine)
        alone = sgd(expected)
        factor = 1 if how.get("op") is hvd.Sum else 2
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *batch(step + 10 * rank)).backward()
            optimizer.step()
            alone.zero_grad()
            for each in mine.ranks:
                (loss_of(expected, *batch(step + 10 * each)) / factor).backward()
            alone.step()
        for one, another in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(one, another, rtol=1e-10, atol=1e-12)
    model = torch.nn.Linear(2, 1)
    plain = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=other)
    weight = model.weight.detach().clone()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    plain.step()
    same(model.weight.detach(), weight - (rank + 1))


def normalization(mine: Any, rank: int) -> None:
    rows = [torch.arange(6.0).reshape(2, 3) * (each + 1) for each in mine.ranks]
    layer = copy.deepcopy(hvd.SyncBatchNorm(3, process_set=mine))  # also in the copy
    inside = rows[mine.rank()].clone().requires_grad_()
    whole = torch.cat(rows).requires_grad_()
    expected = torch.nn.BatchNorm1d(3)(whole)
    result = layer(inside)
    torch.testing.assert_close(result, expected[2 * mine.rank() :][:2])
    (result * torch.arange(6.0).reshape(2, 3)).sum().backward()
    (expected * torch.arange(6.0).reshape(2, 3).repeat(2, 1)).sum().backward()
    torch.testing.assert_close(inside.grad, whole.grad[2 * mine.rank() :][:2])
    assert pickle.loads(pickle.dumps(mine)).ranks == mine.ranks
    pickle.loads(pickle.dumps(hvd.SyncBatchNorm(3)))


def two_sets() -> None:
    torch.set_num_threads(1)
    even = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[even])
    odd = hvd.add_process_set([1, 3])
    rank = hvd.rank()
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    assert hvd.global_process_set.size() == 4
    operations(mine, rank)
    gradients_of_operations(mine, rank)
    normalization(mine, rank)
    refusals(mine, other, rank)
    training(mine, other, rank)
    same(hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum), torch.full((2,), 6.0))
    assert hvd.remove_process_set(odd)
    with pytest.raises(ValueError, match="is not added"):
        hvd.allreduce(torch.ones(1), process_set=odd)
    hvd.shutdown()


def test_two_sets() -> None:
    ranks.run(two_sets, 4)


def worlds() -> None:
    """What Horovod's `init` takes."""
    for comm, message in (
        ([0], r"comm=\[0\] are not all 2 ranks"),
        ([0, 1, 2], "are not all 2 ranks"),
        ("ranks", "comm must be a list of ranks or None, not 'ranks'"),
        (object(), "comm must be a list of ranks or None"),
    ):
        with pytest.raises(ronde.UsageError, match=message):
            hvd.init(comm)
        assert not hvd.is_initialized()
    pair = hvd.ProcessSet([0, 1][:1])
    for comm in (None, [], [1, 0]):
        hvd.init(comm, [pair])
        assert pair.included() == (hvd.rank() == 0)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.shutdown()
    hvd.init(process_sets="dynamic", join_average="contributing")
    hvd.shutdown()


def test_how_worlds_begin() -> None:
    ranks.run(worlds, 2)
