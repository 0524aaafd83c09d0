"""`ronde.torch` with `op=Adasum`: tensors, and the optimizer that combines the ranks' own steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.ranks.torch.training import adam, agree, batch, loss_of, mine, network, sgd

from ronde.errors import UsageError
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

STEPS = 3


def combined(a: Any, b: Any) -> Any:
    ab, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def adasum(tensors: list[Any]) -> Any:
    while len(tensors) > 1:
        tensors = [combined(a, b) for a, b in zip(tensors[::2], tensors[1::2])]
    return tensors[0]


def parts(x: Any, passes: int) -> list[list[Any]]:
    """The rows of each rank and backward pass."""
    return [list(torch.tensor_split(rows, passes)) for rows in torch.tensor_split(x, hvd.size())]


def backward(model: Any, rank: int, step: int, passes: int) -> None:
    images, labels = batch(step)
    for image, label in zip(parts(images, passes)[rank], parts(labels, passes)[rank]):
        loss_of(model, image, label, branches=rank % 2 == 0).backward()  # odd ranks lack some gradients


def train_alone(model: Any, make: Any, passes: int) -> None:
    """What the ranks do together: each makes its own step from the common parameters, with its own state."""
    models = [copy.deepcopy(model) for _ in range(hvd.size())]
    optimizers = [make(each) for each in models]
    for step in range(STEPS):
        for rank, (one, optimizer) in enumerate(zip(models, optimizers)):
            one.load_state_dict(model.state_dict())
            optimizer.zero_grad()
            backward(one, rank, step, passes)
            optimizer.step()
        with torch.no_grad():
            for common, *ones in zip(model.parameters(), *(each.parameters() for each in models)):
                common.add_(adasum([one - common for one in ones]))


# Optimizers


def same_as_alone() -> None:
    hvd.init()
    for make in (sgd, adam):
        for passes in (1, 2):
            expected, model = network(), network()
            train_alone(expected, make, passes)
            memory = [parameter.data_ptr() for parameter in model.parameters()]
            optimizer = hvd.DistributedOptimizer(
                make(model), model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
            )
            assert isinstance(optimizer, make(model).__class__)
            assert optimizer.backward_passes_per_step == passes
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(model, hvd.rank(), step, passes)
                optimizer.step()
            agree(model, expected)
            assert memory == [parameter.data_ptr() for parameter in model.parameters()]
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_combines_what_each_rank_would_change(n: int) -> None:
    ranks.run(same_as_alone, n)


def trains(compression: Any, **how: Any) -> tuple[float, float]:
    model = network()
    optimizer = hvd.DistributedOptimizer(adam(model), op=hvd.Adasum, compression=compression, **how)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    images, labels = mine(batch(0)[0]), mine(batch(0)[1])
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = loss_of(model, images, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    agree(model, copy.deepcopy(model))
    return losses[0], losses[-1]


def other_uses() -> None:
    hvd.init()
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        first, last = trains(compression)
        assert last < first / 3

    model = network()  # an optimizer that needs a closure
    images, labels = mine(batch(0)[0]), mine(batch(0)[1])
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.05), op=hvd.Adasum)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, images, labels)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]
    agree(model, copy.deepcopy(model))

    more = torch.nn.Parameter(torch.full((3,), 1.0 + 1.0j, dtype=torch.complex128))
    added = torch.nn.Parameter(torch.ones(4).to(memory_format=torch.contiguous_format))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([more], lr=1.0), op=hvd.Adasum)
    optimizer.add_param_group({"params": [added]})
    more.grad, added.grad = torch.full_like(more, 1j), torch.eye(4)[hvd.rank()]
    optimizer.step()  # equal changes: their mean; orthogonal ones: their sum
    assert (more == 1).all()
    assert torch.equal(added, 1 - torch.eye(4)[: hvd.size()].sum(0))
    hvd.shutdown()


def test_it_trains_however_it_is_used() -> None:
    ranks.run(other_uses, 2)


# Tensors, and misuse


def tensors() -> None:
    hvd.init()
    assert hvd.Adasum is not hvd.Average
    given = [torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(hvd.size())]
    x, expected = given[hvd.rank()], adasum(given)
    torch.testing.assert_close(hvd.allreduce(x, op=hvd.Adasum), expected)
    results = hvd.grouped_allreduce([x.t(), x, torch.ones(3)], op=hvd.Adasum, name="group")
    torch.testing.assert_close(results, [expected.t(), expected, torch.ones(3)])
    assert hvd.allreduce_(x, op=hvd.Adasum) is x
    torch.testing.assert_close(x, expected)
    with pytest.raises(NotImplementedError, match="allreduce with op=Adasum has no gradient"):
        hvd.allreduce(torch.ones(3, requires_grad=True), op=hvd.Adasum).sum().backward()

    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    with pytest.raises(ValueError, match="gradient_predivide_factor needs op=Average"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        optimizer.set_backward_passes_per_step(0)
    with pytest.raises(AssertionError, match=r"change them between backward\(\) and step\(\)"):
        optimizer.skip_synchronize()
    optimizer.synchronize()
    hvd.shutdown()


def test_tensors() -> None:
    ranks.run(tensors, 2, environ={"RONDE_TRANSPORT": "tcp"})


def refused() -> None:
    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
    loss_of(model, *batch(0)).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"power of two of them, not 3"):
        optimizer.step()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, before[name])
    hvd.shutdown()


def test_three_ranks_are_refused() -> None:
    ranks.run(refused, 3)
