"""Groups in `ronde.torch`: complete together or not at all, with sparse tensors and other devices among them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from tests.ranks.torch.training import STEPS, Network, agree, batch, loss_of, mine, network, sgd

import ronde
from ronde.testing import ranks
from ronde.types import Kind

torch = pytest.importorskip("torch")
hvd: Any = import_module("ronde.torch")
groups_of: Any = import_module("ronde.torch.tensors")
calls: Any = import_module("ronde.torch.call")


def tensors(rank: int) -> list[Any]:
    return [
        torch.full((3, 2), rank + 1.0),
        torch.full((), rank + 1, dtype=torch.int64),
        torch.full((4, 5), rank + 1.0, dtype=torch.float64).t(),
        torch.full((70_000,), rank + 1.0, dtype=torch.bfloat16),
    ]


def together(rank: int, size: int) -> None:
    """A group is one tensor to the engine: nothing of it is done as long as a rank has not submitted it."""
    total = size * (size + 1) // 2
    for name in ("sums", None):
        given = tensors(rank)
        handle = hvd.grouped_allreduce_async_(given, name=name, op=hvd.Sum)
        results = hvd.synchronize(handle)
        assert hvd.poll(handle)
        for result, tensor in zip(results, given, strict=True):
            assert result is tensor
            assert (result == total).all()
    if rank == 0 and size > 1:
        handle = hvd.grouped_allreduce_async(tensors(rank), name="late", op=hvd.Max)
        with pytest.raises(ValueError, match="'late' is in flight already"):
            hvd.allreduce_async(torch.ones(1), name="late")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.grouped_allreduce_async(tensors(rank), name="late", op=hvd.Max)
    assert all((result == size).all() for result in hvd.synchronize(handle))
    rows = [torch.full((rank + index, 2), rank) for index in range(3)]
    for index, result in enumerate(hvd.grouped_allgather(rows, name="rows")):
        assert result[:, 0].tolist() == [each for each in range(size) for _ in range(each + index)]
    for results in (
        hvd.grouped_reducescatter([torch.full((2 * size,), rank + 1.0)] * 2, name="parts", op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async([torch.full((2 * size,), rank + 1.0)], op=hvd.Sum)),
    ):
        assert all(result.tolist() == [total, total] for result in results)
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []


def with_sparse_ones(rank: int, size: int) -> None:
    """The dense ones are the group; of the sparse ones positions and values are gathered."""
    table = torch.zeros(6, 2).index_fill(0, torch.tensor([rank, 4]), 1.0).to_sparse(1)
    expected = torch.zeros(6, 2)
    expected[:size] += 1
    expected[4] += size
    for name in ("mixed", None):
        one, two, three = hvd.grouped_allreduce([table, torch.ones(2), table * 2], name=name, op=hvd.Sum)
        assert torch.equal(one.to_dense(), expected)
        assert torch.equal(two, torch.full((2,), float(size)))
        assert torch.equal(three.to_dense(), expected * 2)
        both = hvd.grouped_allreduce_([table.clone(), table * 3], name=name, op=hvd.Average)
        torch.testing.assert_close([each.to_dense() for each in both], [expected / size, expected * 3 / size])


def on_other_devices(rank: int, size: int) -> None:
    """Copies in main memory and what is there by itself make one group; a CPU tensor is copied like any other."""
    total = float(size * (size + 1) // 2)
    for kind, in_place in ((Kind.allreduce, False), (Kind.allreduce, True), (Kind.allgather, False)):
        given = [torch.full((2,), rank + 1.0), torch.full((2, 2), rank + 1.0).t()]
        name = f"staged {kind.name} {in_place}"
        call = calls.Call(kind, name, hvd.global_process_set, in_place=in_place, waits=True, is_group=True)
        handle = groups_of.staged_group(call, given, [True, False], "cpu+cuda")
        results = handle.wait()
        assert handle.done()
        assert handle.wait() is results
        if kind is Kind.allreduce:
            assert [result.unique().tolist() for result in results] == [[total]] * 2
            assert [result is tensor for result, tensor in zip(results, given)] == [in_place] * 2
            assert (given[0][0] == (total if in_place else rank + 1)).all()
        else:
            assert results[0].tolist() == [each + 1 for each in range(size) for _ in range(2)]


def disagreeing(rank: int, size: int) -> None:
    if size == 1:
        return
    one, two, table = torch.ones(2), torch.ones(3), torch.eye(3).to_sparse()
    last = rank == size - 1
    for ours, theirs, message in (
        ([one, two], [one], "rank 0 submitted allreduce of 2 tensors, but rank . of 1"),
        ([one, two], [one, one], r"\(tensor 1 of the group\)"),
        ([one, two], [table, two], "allreduce of 2 tensors, but rank . of 1"),
        ([one, table], [table, one], r"device cpu\+sparse, but rank . with device sparse\+cpu"),
        ([table], [one, one], "allgather, but rank . allreduce"),
    ):
        # From now on it is cached.
        assert hvd.grouped_allreduce([one, one], name=message)[1].tolist() == [1, 1]
        with pytest.raises(ronde.MismatchError, match=message):
            hvd.grouped_allreduce(theirs if last else ours, name=message)
        assert hvd.grouped_allreduce([one, one], name=message)[1].tolist() == [1, 1]


class WithTable(Network):
    """Also with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 2, sparse=True)

    def forward(self, images: Any, branches: bool = True) -> Any:
        words = (images[:, 0, 0].abs() * 10).long() % 7
        return super().forward(images, branches) + self.table(words).sum(dim=1)


def sparse_network() -> Any:
    torch.manual_seed(7)
    return WithTable().double()


def plain_sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients(rank: int, size: int) -> None:
    """Groups of gradients: counted and listed, dense and sparse, compressed and not, with one that comes to nothing."""
    for make_model, make, how in (
        (network, sgd, dict(groups=3)),
        (network, sgd, dict(groups="lists", op=hvd.Sum)),
        (network, sgd, dict(groups="lists", symmetric_gradients=False)),
        (sparse_network, plain_sgd, dict(groups=2)),
        (sparse_network, plain_sgd, dict(groups="lists", sparse_as_dense=True)),
        (sparse_network, plain_sgd, dict(groups="lists", compression=hvd.Compression.bf16)),
    ):
        model, expected = make_model(), make_model()
        if how.get("groups") == "lists":
            lists = [[model.scale, model.last.weight, model.fixed], [model.branch.weight, model.branch.bias]]
            if make_model is sparse_network:
                lists[0].append(model.table.weight)
            how = {**how, "groups": lists}
        optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), **how)
        alone = make(expected)
        for step in range(STEPS):
            images, labels = batch(step)
            branches = step != 2  # without, two of the gradients are zero everywhere
            optimizer.zero_grad()
            alone.zero_grad()
            part = size if how.get("op") is hvd.Sum else 1  # the mean as the sum of parts
            (loss_of(model, mine(images), mine(labels), branches=branches) / part).backward()
            loss_of(expected, images, labels, branches=branches).backward()
            if not branches and size > 1:
                for parameter in expected.branch.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            alone.step()
        agree(model, expected, **(dict(rtol=0.1, atol=0.1) if "compression" in how else {}))


CHECKS = (together, with_sparse_ones, on_other_devices, disagreeing, gradients)


def groups() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 3])
def test_groups(n: int) -> None:
    ranks.run(groups, n)


def test_groups_that_are_not_fused() -> None:
    ranks.run(groups, 2, environ={"RONDE_DISABLE_GROUP_FUSION": "1", "RONDE_TRANSPORT": "tcp"})
