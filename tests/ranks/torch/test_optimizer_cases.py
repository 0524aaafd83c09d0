"""`DistributedOptimizer` where it is not plain: sparse gradients, changes on the way, mistakes, a new world."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from tests.ranks.torch.training import (
    STEPS,
    adam,
    agree,
    batch,
    loss_of,
    mine,
    network,
    sgd,
    train,
    train_alone,
)

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def sparse_gradients(rank: int, size: int) -> None:
    """An embedding's: rows that several ranks touch, rows that one does, and a rank that touches none."""
    for sparse_as_dense in (False, True):
        tables = [torch.nn.Embedding(10, 3, sparse=True).double() for _ in range(2)]
        for table in tables:
            torch.nn.init.constant_(table.weight, 1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(tables[0].parameters(), lr=0.5),
            tables[0].named_parameters(),
            sparse_as_dense=sparse_as_dense,
        )
        alone = torch.optim.SGD(tables[1].parameters(), lr=0.5)

        def rows(step: int, other: int) -> Any:
            return torch.tensor([0, other + 1, other + 1, other + 2 + step])

        for step in range(3):
            optimizer.zero_grad()
            alone.zero_grad()
            if step != 1 or rank == size - 1:
                tables[0](rows(step, rank)).pow(2).sum().backward()
            for other in range(size):
                if step != 1 or other == size - 1:
                    (tables[1](rows(step, other)).pow(2).sum() / size).backward()
            optimizer.step()
            assert tables[0].weight.grad.is_sparse
            alone.step()
            agree(tables[0], tables[1])
    if size > 1:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(tables[0].parameters(), lr=0.5), op=ronde.Max)
        loss = tables[0](rows(0, rank)).sum()
        with pytest.raises(ValueError, match="sparse gradients cannot be reduced with op=Max"):
            loss.backward()
        assert not optimizer.state


def small_gradients_of_several_kinds(rank: int, size: int) -> None:
    """Neighbours in memory, which are reduced together: dense, sparse, and missing on some ranks."""

    def layers() -> Any:
        torch.manual_seed(5)
        return torch.nn.ModuleDict(
            {
                "first": torch.nn.Linear(3, 3),
                "table": torch.nn.Embedding(10, 3, sparse=True),
                "skipped": torch.nn.Linear(3, 3),
                "last": torch.nn.Linear(3, 1),
            }
        ).double()

    def loss(model: Any, step: int, other: int) -> Any:
        hidden = model["first"](model["table"](torch.tensor([other, other + step])))
        if (step + other) % 2:
            hidden = hidden + model["skipped"](hidden)
        return model["last"](hidden).pow(2).sum()

    model, expected = layers(), layers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    alone = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        alone.zero_grad()
        loss(model, step, rank).backward()
        for other in range(size):
            (loss(expected, step, other) / size).backward()
        optimizer.step()
        alone.step()
        agree(model, expected)


def new_parameters(rank: int, size: int) -> None:
    """Those of a group that is added later are reduced, too, whether they had a name before or not."""
    for is_named in (False, True):
        model, expected = network(), network()
        optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters() if is_named else None)
        alone = torch.optim.SGD(expected.last.parameters(), lr=0.1)
        for step in range(STEPS):
            if step == 1:
                optimizer.add_param_group({"params": list(model.branch.parameters()), "lr": 0.2})
                alone.add_param_group({"params": list(expected.branch.parameters()), "lr": 0.2})
            images, labels = batch(step)
            model.zero_grad()
            expected.zero_grad()
            loss_of(model, mine(images), mine(labels)).backward()
            loss_of(expected, images, labels).backward()
            optimizer.step()
            alone.step()
        agree(model, expected)


def another_optimizer(rank: int, size: int) -> None:
    """A new one for the same parameters takes them over, whether the old one still lives or not."""
    model, expected = network(), network()
    old = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, old)
    new = hvd.DistributedOptimizer(adam(model), model.named_parameters())
    train(model, new)
    train_alone(expected, sgd)
    train_alone(expected, adam)
    agree(model, expected)
    del old, new
    gc.collect()
    train_alone(model, sgd)  # nobody follows the gradients any more
    train_alone(expected, sgd)
    agree(model, expected)
    train(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))
    train_alone(expected, sgd)
    agree(model, expected)


def refused(rank: int, size: int) -> None:
    model = network()
    named = list(model.named_parameters())
    optimizer = sgd(model)
    for how, message in (
        (dict(named_parameters=named + [named[0]]), "must be unique; these are not: scale"),
        (dict(named_parameters=named[1:]), r"lacks parameters .* with the shapes \(\)"),
        (dict(named_parameters=model.parameters()), "must be pairs"),
        (dict(backward_passes_per_step=0), "at least 1, not 0"),
        (dict(op=ronde.Sum, gradient_predivide_factor=2.0), "needs op=Average"),
        (dict(process_set=3), "process_set must be a ProcessSet, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(optimizer, **how)
    if size > 1:
        for groups, message in (
            (-1, "positive number"),
            ([["scale"]], "lists of parameters"),
            (
                [[model.scale], [model.scale]],
                r"shape \(\) in groups\[1\] is in groups\[0\], too; .* one group only",
            ),
            (
                [[torch.nn.Parameter(torch.ones(5))]],
                r"shape \(5,\) in groups\[0\] is not one of the optimizer's",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                hvd.DistributedOptimizer(optimizer, named, groups=groups)
        distributed = hvd.DistributedOptimizer(optimizer, named)
        loss = loss_of(model, *batch(0))
        with pytest.raises(AssertionError, match="create_graph=True is not supported"):
            loss.backward(create_graph=True)
        assert not distributed.state
    distributed = hvd.DistributedOptimizer(optimizer, named)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(distributed, named)


def mismatches(rank: int, size: int) -> None:
    """Models of different shapes: every rank hears of it, and can go on."""
    if size == 1:
        return
    layer = torch.nn.Linear(3, 2 + 100 * rank)
    said = r"parameter 'weight' is \(2, 3\) float32 on rank 0, but \(102, 3\) float32 on rank 1"
    for symmetric in (True, False):
        with pytest.raises(ronde.MismatchError, match=said):
            hvd.DistributedOptimizer(sgd(layer), layer.named_parameters(), symmetric_gradients=symmetric)
    expected, model = network(), network()
    train(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))
    train_alone(expected, sgd)
    agree(model, expected)


CHECKS = (
    sparse_gradients,
    small_gradients_of_several_kinds,
    new_parameters,
    another_optimizer,
    refused,
    mismatches,
)


def cases() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_cases(n: int) -> None:
    ranks.run(cases, n)


def after_a_new_world() -> None:
    """An optimizer goes on in a new world: its memory is shared with nobody there, and still right."""
    torch.set_num_threads(1)
    hvd.init()
    expected, model = network(), network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer)
    hvd.shutdown()
    hvd.init()
    train(model, optimizer)
    alone = sgd(expected)
    for _ in range(2):
        for step in range(STEPS):
            alone.zero_grad()
            loss_of(expected, *batch(step)).backward()
            alone.step()
    agree(model, expected)
    hvd.shutdown()


def test_after_a_new_world() -> None:
    ranks.run(after_a_new_world, 2)


def lose_a_rank() -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer)
    if hvd.rank() == 1:
        os._exit(0)
    train(model, optimizer, steps=1)


def test_a_lost_rank() -> None:
    with ranks.start(lose_a_rank, 3) as job:
        outcomes = job.outcomes()
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, ronde.PeerLostError), outcomes[rank].traceback_text
        assert "rank 1" in str(outcomes[rank].error)
