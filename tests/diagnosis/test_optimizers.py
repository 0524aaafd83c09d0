"""Optimizers whose parameters differ between ranks: the error names the parameter and both values."""

from __future__ import annotations

import re
from typing import Any

import pytest

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

SHAPE = r"parameter '0.weight' is \(8, 4\) float32 on rank 0, but \(9, 4\) float32 on rank 1 \(and 2 more differ\)"
TYPE = r"parameter '0.weight' is \(8, 4\) float32 on rank 0, but \(8, 4\) float64 on rank 1 \(and 3 more differ\)"
EXTRA = r"rank 1 trains parameter '2.weight' \(2, 2\) float32, which rank 0 does not have, or does not train"
FROZEN = r"rank 0 trains parameter '0.weight' \(8, 4\) float32, which rank 1 does not have, or does not train"


def network(hidden: int = 8, more: int = 0) -> Any:
    layers = [torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 2)]
    return torch.nn.Sequential(*layers, *(torch.nn.Linear(2, 2, bias=False) for _ in range(more)))


def differing(rank: int) -> list[tuple[Any, str]]:
    """Models that this rank builds in another way than rank 0, and what is said of each."""
    frozen = network()
    frozen[0].weight.requires_grad_(rank == 0)
    return [
        (network(hidden=8 + rank), SHAPE),
        (network().double() if rank else network(), TYPE),
        (network(more=rank), EXTRA),
        (frozen, FROZEN),
    ]


def build_different_models() -> None:
    torch.set_num_threads(1)
    hvd.init()
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"symmetric_gradients": False},
        {"op": hvd.Adasum},
    )
    for model, expected in differing(hvd.rank()):
        for choice in choices:
            with pytest.raises(ronde.MismatchError, match=re.compile(expected)):
                hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **choice
                )
    hvd.shutdown()


def test_a_parameter_that_differs_is_named_with_both_shapes() -> None:
    ranks.run(build_different_models, 2)


def train_in_another_order() -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = network()
    named = list(model.named_parameters())[:: -1 if hvd.rank() else 1]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
    weights = hvd.allgather(torch.cat([each.detach().flatten() for each in model.parameters()])[None])
    assert torch.equal(weights[0], weights[1])
    hvd.shutdown()


@pytest.mark.slow
def test_the_order_of_named_parameters_may_differ() -> None:
    ranks.run(train_in_another_order, 2)
