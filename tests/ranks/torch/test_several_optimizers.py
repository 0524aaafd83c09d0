"""Several distributed optimizers in one process, as a GAN has, and steps that come too early."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
from tests.ranks.torch.training import hvd, torch

from ronde.testing import ranks

CHOICES: tuple[dict[str, Any], ...] = ({}, {"symmetric_gradients": False}, {"groups": 1})


def models() -> tuple[Any, Any]:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 1).double()


def plain(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_both(generator: Any, critic: Any, optimizers: list[Any]) -> None:
    """Train with passes that go through both models, whose parameters have the same names."""
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(step)
        critic(generator(torch.randn(2, 4, dtype=torch.float64))).mean().backward()
        for optimizer in reversed(optimizers):
            optimizer.step()


def optimizers_with_equal_names() -> None:
    torch.set_num_threads(1)
    hvd.init()
    expected = models()
    train_both(*expected, [plain(each) for each in expected])
    for choice, is_named in itertools.product(CHOICES, (True, False)):
        both = models()
        optimizers = [
            hvd.DistributedOptimizer(plain(each), each.named_parameters() if is_named else None, **choice)
            for each in both
        ]
        train_both(*both, optimizers)
        for mine, theirs in zip(both, expected):
            for one, another in zip(mine.parameters(), theirs.parameters()):
                assert torch.allclose(one, another, rtol=1e-12, atol=0)
    both = models()
    train_both(
        *both,
        [
            hvd.DistributedOptimizer(plain(each), each.named_parameters(), op=op)
            for each, op in zip(both, (hvd.Average, hvd.Adasum))
        ],
    )
    hvd.shutdown()


def names_sent(optimizer: Any) -> list[str]:
    return sorted(gradient.name for gradient in optimizer._gradients)


def optimizers_of_different_ages() -> None:
    """Rank 1 still has optimizers that rank 0 has dropped; the ranks agree on names that are free on both."""
    torch.set_num_threads(1)
    hvd.init()
    kept = []
    for _ in range(3):
        model, _ = models()
        optimizer = hvd.DistributedOptimizer(plain(model), model.named_parameters())
        again = hvd.DistributedOptimizer(plain(model), model.named_parameters())
        assert names_sent(optimizer) == names_sent(again)  # of the same parameters
        assert hvd.allgather_object(names_sent(again))[0] == names_sent(again)
        kept += [optimizer, again] * hvd.rank()
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        again.step()
        del model, optimizer, again
    assert len({tuple(names_sent(each)) for each in kept}) == len(kept) // 2
    hvd.shutdown()


def caught(passes_per_step: list[int], expected: int) -> list[str]:
    """Return the warnings of steps, each after so many backward passes."""
    model, _ = models()
    optimizer = hvd.DistributedOptimizer(
        plain(model), model.named_parameters(), backward_passes_per_step=expected
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for passes in passes_per_step:
            optimizer.zero_grad()
            for _ in range(passes):
                model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message) for warning in found]


def early_steps() -> None:
    torch.set_num_threads(1)
    hvd.init()
    (said,) = caught([1] * 8, 4)
    assert "step() called after 1 of backward_passes_per_step=4 backward passes" in said
    for fine in ([4, 4, 2, 4, 4, 2], [2, 0, 0], [4]):
        assert caught(fine, 4) == []
    assert caught([1] * 4, 1) == []
    hvd.shutdown()


def passes_of_another_model() -> None:
    """Both errors of a pass that went through a model by the way name the remedy, which works."""
    torch.set_num_threads(1)
    hvd.init()
    generator, critic = models()
    optimizer = hvd.DistributedOptimizer(plain(critic), critic.named_parameters())
    noise = torch.ones(2, 4, dtype=torch.float64)
    critic(generator(noise)).mean().backward()
    with pytest.raises(AssertionError, match=r"synchronize\(\) before it; .* requires_grad_\(False\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match=r"as in a GAN.* requires_grad_\(False\)"):
        critic(generator(noise)).mean().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    critic.requires_grad_(False)
    critic(generator(noise)).mean().backward()
    critic.requires_grad_(True)
    optimizer.zero_grad()
    critic(generator(noise).detach()).mean().backward()
    optimizer.step()
    hvd.shutdown()


@pytest.mark.parametrize(
    "program",
    [optimizers_with_equal_names, optimizers_of_different_ages, early_steps, passes_of_another_model],
)
def test_several_optimizers(program: Any) -> None:
    ranks.run(program, 2)
