"""A small transformer and its training, which tests do with each backend and compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WORDS, WIDTH, LENGTH, ROWS = 23, 16, 5, 12  # ROWS of a batch: 2, 3 or 4 ranks take equally many


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a network of two layers, with names that tests of tensor parallelism use."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        query, key, value = self.query(self.before(x)).view(rows, length, 3, 2, WIDTH // 2).unbind(2)
        scores = torch.einsum("rlhw,rmhw->rhlm", query, key) / WIDTH**0.5
        mixed = torch.einsum("rhlm,rmhw->rlhw", scores.softmax(-1), value)
        x = x + self.output(mixed.reshape(rows, length, WIDTH))
        return x + self.down(torch.relu(self.up(self.between(x))))


class Transformer(nn.Module):  # type: ignore[misc]
    """`extra`: a layer that takes part only in the forward passes that ask for it."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Any, use_extra: bool = True) -> Any:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        if use_extra:
            x = x + self.extra(x)
        return self.head(x)


def transformer(depth: int = 2) -> Any:
    """Return the same transformer on all ranks."""
    torch.manual_seed(7)
    return Transformer(depth)


def batch(step: int, rows: int = ROWS) -> Any:
    """Return this rank's rows of words."""
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(WORDS, (rows, LENGTH + 1), generator=generator)
    return words.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any, words: Any, *args: Any) -> Any:
    scores = model(words[:, :-1], *args)
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), words[:, 1:].flatten())


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: Any, steps: int = 3) -> list[Any]:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return values(model)


def values(model: Any) -> list[Any]:
    """Return copies of the parameters, whole ones also if ranks have shards."""
    return [
        (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for each in model.parameters()
    ]


def agree_on_all_ranks(tensors: list[Any]) -> None:
    flat = torch.cat([each.flatten() for each in tensors])
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, flat)
    for other in others:
        assert torch.equal(flat, other)
