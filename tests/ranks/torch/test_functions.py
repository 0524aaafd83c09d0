"""`ronde.torch`: ranks tell each other parameters, an optimizer's state, and any object."""

from __future__ import annotations

from typing import Any

import pytest

from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def equal(one: Any, other: Any) -> bool:
    """Compares nested states, tensors by value, type and shape."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) and type(one) is type(other)


def train(network: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        network(torch.randn(5, 3)).pow(2).mean().backward()
        optimizer.step()


def parameters(rank: int, size: int) -> None:
    for root in range(size):
        expected = model(seed=root).state_dict()
        for pick in (
            lambda mine: mine.state_dict(),
            lambda mine: mine.named_parameters(),
            lambda mine: list(mine.named_parameters()),
            lambda mine: list(mine.parameters()),
            lambda mine: mine.parameters(),
        ):
            mine = model(seed=rank)
            hvd.broadcast_parameters(pick(mine), root_rank=root)
            for name, parameter in mine.named_parameters():
                assert torch.equal(parameter, expected[name])
    mine = model(seed=rank)
    mine[1].num_batches_tracked += rank
    mine[1].running_mean += rank
    hvd.broadcast_parameters(mine.state_dict())
    assert equal(mine.state_dict(), model(seed=0).state_dict())
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) + rank
    kept = hvd.broadcast(channels_last, 0)
    hvd.broadcast_parameters({"weights": channels_last, "nothing": None})
    assert torch.equal(channels_last, kept)
    for wrong in (3, "weights", torch.zeros(3), {"steps": 3}):
        with pytest.raises(ValueError, match=r"expected a state_dict|only tensors can be broadcast"):
            hvd.broadcast_parameters(wrong)


OPTIMIZERS = {
    "plain": lambda weights, lr: torch.optim.SGD(weights, lr=lr),
    "momentum": lambda weights, lr: torch.optim.SGD(weights, lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda weights, lr: torch.optim.Adam(weights, lr=lr, betas=(0.8, 0.99), amsgrad=True),
    "adagrad": lambda weights, lr: torch.optim.Adagrad(weights, lr=lr),
    "tensor rate": lambda weights, lr: torch.optim.Adam(weights, lr=torch.tensor(lr), capturable=False),
    "lbfgs": lambda weights, lr: torch.optim.LBFGS(weights, lr=lr),
}


def state_of(kind: str, rank: int, steps: int, root: int, distributed: bool) -> None:
    """Only the root has trained, and with options of its own; in the end all have its state."""
    network = model(seed=1)
    optimizer = OPTIMIZERS[kind](network.parameters(), 0.01 + 0.001 * rank)
    if kind != "lbfgs":
        for _ in range(steps if rank == root else 0):
            train(network, optimizer)
    elif rank == root:
        images = torch.randn(5, 3)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = network(images).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    states = hvd.allgather_object(optimizer.state_dict())
    assert all(equal(states[root], other) for other in states), kind
    if steps == 0:
        assert not states[root]["state"]
    rate = states[root]["param_groups"][0]["lr"]
    assert float(rate) == pytest.approx(0.01 + 0.001 * root)
    if kind != "lbfgs":
        torch.manual_seed(0)
        train(network, optimizer)
        assert all(
            equal(weights, other)
            for weights in [network.state_dict()]
            for other in hvd.allgather_object(weights)
        )


def optimizer_states(rank: int, size: int) -> None:
    for kind in OPTIMIZERS:
        state_of(kind, rank, steps=2, root=0, distributed=False)
    state_of("momentum", rank, steps=2, root=size - 1, distributed=True)
    state_of("adam", rank, steps=2, root=0, distributed=True)
    state_of("adam", rank, steps=0, root=0, distributed=True)  # nobody has trained
    # The others have, and the root has not: they forget what they had.
    network = model(seed=1)
    optimizer = torch.optim.Adam(network.parameters())
    if rank:
        train(network, optimizer)
    hvd.broadcast_optimizer_state(optimizer)
    assert not optimizer.state_dict()["state"]


def objects(rank: int, size: int) -> None:
    for root in range(size):
        mine = {"rank": rank, "text": "ä" * rank, "tensor": torch.full((rank + 1,), rank)}
        told = hvd.broadcast_object(mine, root_rank=root)
        assert told["rank"] == root
        assert told["text"] == "ä" * root
        assert torch.equal(told["tensor"], torch.full((root + 1,), root))
        assert (told is mine) == (rank == root)
    assert hvd.broadcast_object([rank] if rank == 0 else None, name="named") == [0]
    assert hvd.allgather_object(("rank", rank)) == [("rank", other) for other in range(size)]
    large = hvd.allgather_object(bytes(100_000 * rank), name="large")
    assert [len(each) for each in large] == [100_000 * other for other in range(size)]


def functions() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in (parameters, optimizer_states, objects):
        check(hvd.rank(), hvd.size())
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_functions(n: int) -> None:
    ranks.run(functions, n)
