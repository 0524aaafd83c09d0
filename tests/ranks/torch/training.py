"""A small network and its training, alone and by ranks together: what tests of `ronde.torch` compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

STEPS = 4
ROWS = 6  # of a batch: 1, 2 or 3 ranks take equally many


class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Convolution, a branch that may go unused, and parameters of every number of axes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 3, 3, padding=1)
        self.branch = torch.nn.Linear(48, 48)
        self.last = torch.nn.Linear(48, 2)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, images: Any, branches: bool = True) -> Any:
        x = torch.relu(self.convolution(images)).flatten(1)
        if branches:
            x = torch.tanh(self.branch(x))
        return self.last(x) * self.scale + self.fixed


def network() -> Any:
    torch.manual_seed(7)
    return Network().double()


def batch(step: int) -> tuple[Any, Any]:
    torch.manual_seed(100 + step)
    return torch.randn(ROWS, 2, 4, 4, dtype=torch.float64), torch.randint(2, (ROWS,))


def loss_of(model: Any, images: Any, labels: Any, **how: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(images, **how), labels)


def mine(x: Any) -> Any:
    return torch.tensor_split(x, hvd.size())[hvd.rank()]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train_alone(model: Any, make: Callable[[Any], Any], steps: int = STEPS) -> None:
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()


def train(model: Any, optimizer: Any, steps: int = STEPS) -> None:
    for step in range(steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss_of(model, mine(images), mine(labels)).backward()
        optimizer.step()


def agree(model: Any, expected: Any, **tolerance: Any) -> None:
    """The parameters are the expected ones but for rounding, and bitwise equal on all ranks."""
    how = tolerance or dict(rtol=1e-10, atol=1e-12)
    for (name, one), other in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(one, other, **how, msg=lambda text: f"{name}: {text}")  # noqa: B023
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for other in hvd.allgather_object(flat):
        assert torch.equal(flat, other)
