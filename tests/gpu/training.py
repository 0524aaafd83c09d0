"""A model and its training, the same in all programs."""

from __future__ import annotations

from typing import Any

import torch
from tests.gpu.programs import my_size, place
from torch import nn

WIDTH, ROWS, STEPS = 64, 24, 4


def network(device: Any = None, dtype: Any = None) -> Any:
    """Return the same model on all ranks."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = nn.Sequential(*(layer() for _ in range(3)))
    return model.to(device or place(), dtype or torch.float32)


def layer() -> Any:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


def rows(step: int, rank: int | None = None, device: Any = None) -> Any:
    """Return inputs and targets of one step: of a rank, or of all ranks (None)."""
    values = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return (values if rank is None else values.chunk(my_size(), 1)[rank]).to(device or place())


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: Any, rank: int | None) -> list[Any]:
    """Train the model and return this rank's parameters or shards.

    `rank`: whose rows (None: all). The mean of the ranks' losses is the loss of all rows.
    """
    parameters = list(model.parameters())
    for step in range(STEPS):
        inputs, targets = rows(step, rank, parameters[0].device).to(parameters[0].dtype)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs).float(), targets.float()).backward()
        optimizer.step()
    mine = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    return [each.detach().clone() for each in mine]


def trained_alone() -> list[Any]:
    """Return the parameters after training with all rows in one process."""
    model = network()
    return train(model, sgd(model), None)
