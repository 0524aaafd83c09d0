"""`DistributedOptimizer`: ranks that share a batch train as one process does with all of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from tests.ranks.torch.training import (
    ROWS,
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

VARIANTS: tuple[dict[str, Any], ...] = (
    dict(),
    dict(symmetric_gradients=False),
    dict(op=ronde.Sum, named=False),
    dict(gradient_predivide_factor=2.0),
    dict(groups=2),
    dict(num_groups=3, symmetric_gradients=False),
    dict(groups=100),
    dict(sparse_as_dense=True),
)


def same_as_alone(rank: int, size: int) -> None:
    for make in (sgd, adam):
        expected = network()
        train_alone(expected, make)
        for variant in VARIANTS:
            how = dict(variant)
            model = network()
            names = model.named_parameters() if how.pop("named", True) else None
            optimizer = make(model)
            if how.get("op") is ronde.Sum:  # the mean as the sum of parts
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.register_hook(lambda gradient: gradient / size)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                optimizer = hvd.DistributedOptimizer(optimizer, names, **how)
            assert isinstance(optimizer, make(model).__class__)
            assert type(optimizer).__name__ == make(model).__class__.__name__
            train(model, optimizer)
            agree(model, expected)


def groups_of_parameters(rank: int, size: int) -> None:
    expected = network()
    train_alone(expected, sgd)
    model = network()
    groups = [
        [model.last.weight, model.last.bias, model.fixed],
        [model.convolution.bias],
    ]
    train(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups))
    agree(model, expected)


def compressed(rank: int, size: int) -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        expected, model = network(), network()
        train_alone(expected, sgd)
        train(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression))
        agree(model, expected, rtol=0.1, atol=0.02)
        assert all(
            parameter.grad.dtype == torch.float64
            for parameter in model.parameters()
            if parameter.requires_grad
        )


def small_types(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected, model = network(), network().to(dtype)
        train_alone(expected, sgd, steps=1)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        images, labels = batch(0)
        loss_of(model, mine(images).to(dtype), mine(labels)).backward()
        optimizer.step()
        agree(model.double(), expected, rtol=0.05, atol=0.05)


def memory(rank: int, size: int) -> None:
    """Gradients stay where they are, whatever zero_grad does; with the layout that the parameter has."""
    model = network().to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    followed = [parameter for parameter in model.parameters() if parameter.requires_grad]
    places = []
    for step in range(STEPS):
        images, labels = batch(step)
        if step == 2:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, mine(images), mine(labels)).backward()
        optimizer.step()
        places.append([parameter.grad.data_ptr() for parameter in followed])
        assert all(parameter.grad.stride() == parameter.stride() for parameter in followed)
    assert size == 1 or places == [places[0]] * STEPS
    assert size == 1 or len({place % 64 for place in places[0]}) == 1
    expected = network()
    train_alone(expected, sgd)
    agree(model, expected)


def several_passes(rank: int, size: int) -> None:
    """Two backward passes, each over half of the rank's rows, before a step: as one over all of them."""
    expected = network()
    train_alone(expected, sgd)
    for symmetric in (True, False):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), backward_passes_per_step=2, symmetric_gradients=symmetric
        )
        assert optimizer.backward_passes_per_step == 2
        for step in range(STEPS):
            optimizer.zero_grad()
            images, labels = (mine(x) for x in batch(step))
            for part in torch.tensor_split(torch.arange(len(labels)), 2):
                share = len(part) / len(labels)
                (loss_of(model, images[part], labels[part]) * share).backward()
                if size > 1 and len(part) and part[0] == 0:
                    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after backward"):
                        optimizer.zero_grad()
            optimizer.step()
        agree(model, expected)
        optimizer.set_backward_passes_per_step(1)
        train(model, optimizer, steps=1)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        optimizer.set_backward_passes_per_step(0)


def too_many_passes(rank: int, size: int) -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    images, labels = (mine(x) for x in batch(0))
    loss_of(model, images, labels).backward()
    if size > 1:
        with pytest.raises(AssertionError, match="more gradients than backward_passes_per_step=1"):
            loss_of(model, images, labels).backward()
    optimizer.synchronize()
    train(model, optimizer)
    expected = network()
    train_alone(expected, sgd)
    agree(model, expected)


def unused_parameters(rank: int, size: int) -> None:
    """Rank 0 leaves out a branch, on some steps everybody does; the mean counts zeros for it."""
    model, expected = network(), network()
    optimizer, alone = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(expected)
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss_of(model, mine(images), mine(labels), branches=step != 2 and rank > 0).backward()
        optimizer.step()
        alone.zero_grad()
        for other in range(size):
            part = torch.tensor_split(torch.arange(ROWS), size)[other]
            used = step != 2 and other > 0
            (loss_of(expected, images[part], labels[part], branches=used) / size).backward()
        for parameter in expected.parameters():
            if parameter.requires_grad and parameter.grad is None and size > 1:
                parameter.grad = torch.zeros_like(parameter)
        alone.step()
    agree(model, expected)


def clipping(rank: int, size: int) -> None:
    """Between synchronize and step everybody sees the same gradients and may change them."""
    model, expected = network(), network()
    optimizer, alone = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(expected)
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss_of(model, mine(images), mine(labels)).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.zero_grad()
        loss_of(expected, images, labels).backward()
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1))
        alone.step()
    agree(model, expected)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def closures(rank: int, size: int) -> None:
    """A closure's gradients are reduced each time the optimizer calls it."""

    def run(model: Any, optimizer: Any, share: Callable[[Any], Any]) -> None:
        for step in range(2):
            images, labels = (share(x) for x in batch(step))

            def closure(images: Any = images, labels: Any = labels) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, images, labels)
                loss.backward()
                return loss

            optimizer.step(closure)

    for make in (sgd, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4)):
        model, expected = network(), network()
        run(model, hvd.DistributedOptimizer(make(model), model.named_parameters()), mine)
        run(expected, make(expected), lambda x: x)
        agree(model, expected, rtol=1e-6, atol=1e-8)


def schedules_and_states(rank: int, size: int) -> None:
    """Learning rate schedulers, hooks and checkpoints work as with the optimizer itself."""
    model, expected = network(), network()
    before, calls = sgd(model), []
    before.register_step_post_hook(lambda *_: calls.append(1))
    early = torch.optim.lr_scheduler.StepLR(before, step_size=3, gamma=0.5)
    optimizer, alone = hvd.DistributedOptimizer(before, model.named_parameters()), sgd(expected)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, alone)]
    assert early.get_last_lr() == [0.1]
    for step in range(STEPS):
        images, labels = batch(step)
        for each, model_of, part in ((optimizer, model, mine), (alone, expected, lambda x: x)):
            each.zero_grad()
            loss_of(model_of, part(images), part(labels)).backward()
            each.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
    agree(model, expected)
    assert len(calls) == STEPS
    assert optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**STEPS)
    states = optimizer.state_dict()["state"], alone.state_dict()["state"]
    for one, other in zip(*(state.values() for state in states)):
        torch.testing.assert_close(one["momentum_buffer"], other["momentum_buffer"])


CHECKS = (
    same_as_alone,
    groups_of_parameters,
    compressed,
    small_types,
    memory,
    several_passes,
    too_many_passes,
    unused_parameters,
    clipping,
    closures,
    schedules_and_states,
)


def optimizers() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_optimizers(n: int) -> None:
    ranks.run(optimizers, n)
