"""`SyncBatchNorm`: ranks with parts of a batch normalize as one process does with all of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

CHANNELS = 3
SHAPES: tuple[tuple[int, ...], ...] = ((), (5,), (4, 2), (2, 3, 2))  # what follows rows and channels
LAYERS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def rows_of(rank: int) -> int:
    return 2 * rank + 2


def parts(shape: tuple[int, ...], size: int, seed: int = 0) -> list[Any]:
    """One batch per rank, of different lengths and far from zero."""
    torch.manual_seed(seed)
    whole = 3 * torch.randn(sum(map(rows_of, range(size))), CHANNELS, *shape, dtype=torch.float64) + 50
    return list(whole.split([rows_of(rank) for rank in range(size)]))


def pair(shape: tuple[int, ...], **how: Any) -> tuple[Any, Any]:
    """A layer of each kind with the same parameters."""
    torch.manual_seed(1)
    expected = LAYERS[len(shape)](CHANNELS, **how).double()
    for parameter in expected.parameters():
        torch.nn.init.uniform_(parameter)
    synced = hvd.SyncBatchNorm(CHANNELS, **how).double()
    synced.load_state_dict(expected.state_dict())
    return synced, expected


def compare(synced: Any, expected: Any, rank: int, size: int, shape: tuple[int, ...], steps: int = 3) -> None:
    for step in range(steps):
        batches = parts(shape, size, seed=step)
        mine, whole = batches[rank].clone().requires_grad_(), torch.cat(batches).requires_grad_()
        result, reference = synced(mine), expected(whole)
        torch.testing.assert_close(result, reference.split(list(map(len, batches)))[rank])
        # The sum of all ranks' losses; each has weights of its own, so that the gradients are not zero.
        weights = [
            torch.linspace(-1, 1, each.numel()).double().view_as(each) * (other + 1)
            for other, each in enumerate(batches)
        ]
        (result * weights[rank]).sum().backward()
        (reference * torch.cat(weights)).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad.split(list(map(len, batches)))[rank])
        for one, other in zip(synced.parameters(), expected.parameters()):
            torch.testing.assert_close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad)
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(synced.get_buffer(name), buffer)


def shapes(rank: int, size: int) -> None:
    for shape in SHAPES:
        compare(*pair(shape), rank, size, shape)


def options(rank: int, size: int) -> None:
    for how in (
        dict(momentum=None),
        dict(momentum=0.5, eps=0.1),
        dict(affine=False),
        dict(track_running_stats=False),
        dict(affine=False, track_running_stats=False),
    ):
        compare(*pair((4, 2), **how), rank, size, (4, 2))


def evaluation(rank: int, size: int) -> None:
    synced, expected = pair((4, 2))
    compare(synced, expected, rank, size, (4, 2), steps=1)
    synced.eval()
    expected.eval()
    if rank == 0:  # nothing is sent
        x = parts((4, 2), size)[0]
        torch.testing.assert_close(synced(x), expected(x))
    # Without running statistics those of the batch count, also in evaluation.
    synced, expected = pair((4, 2), track_running_stats=False)
    compare(synced.eval(), expected.eval(), rank, size, (4, 2), steps=1)


def layouts(rank: int, size: int) -> None:
    synced, expected = pair((4, 2))
    batches = [each.to(memory_format=torch.channels_last) for each in parts((4, 2), size)]
    result = synced(batches[rank])
    reference = expected(torch.cat(batches)).split(list(map(len, batches)))[rank]
    torch.testing.assert_close(result, reference)
    wide = torch.cat([batches[rank], batches[rank]], dim=3)
    torch.testing.assert_close(synced(wide[..., :2]), reference)


def small_types(rank: int, size: int) -> None:
    for dtype, places in ((torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-4)):
        for parameters in {dtype, torch.float32}:
            synced, expected = pair((4, 2))
            synced.to(parameters)
            batches = [each - 50 for each in parts((4, 2), size)]
            mine, whole = batches[rank].to(dtype).requires_grad_(), torch.cat(batches).requires_grad_()
            result, reference = synced(mine), expected(whole)
            assert result.dtype == dtype
            part = reference.split(list(map(len, batches)))[rank]
            torch.testing.assert_close(result.double(), part, rtol=places, atol=places)
            result.float().pow(2).sum().backward()
            reference.pow(2).sum().backward()
            assert mine.grad.dtype == dtype
            assert synced.weight.grad.dtype == parameters
            torch.testing.assert_close(
                synced.running_var.double(), expected.running_var, rtol=places, atol=places
            )


def a_rank_without_rows(rank: int, size: int) -> None:
    synced, expected = pair((4, 2))
    whole = torch.cat(parts((4, 2), size)).requires_grad_()
    mine = (whole if rank == size - 1 else whole[:0]).detach().requires_grad_()
    result, reference = synced(mine), expected(whole)
    torch.testing.assert_close(result, reference if len(mine) else reference[:0])
    result.pow(3).sum().backward()
    reference.pow(3).sum().backward()
    if len(mine):
        torch.testing.assert_close(mine.grad, whole.grad)
    torch.testing.assert_close(synced.running_mean, expected.running_mean)


def mistakes(rank: int, size: int) -> None:
    synced, _ = pair(())
    for wrong in (torch.zeros(3), torch.zeros(2, CHANNELS + 1)):
        with pytest.raises(ValueError, match="expected an input of"):
            synced(wrong.double())
    with pytest.raises(ValueError, match=r"[Ee]xpected .*more than 1 value|at least 2 values per channel"):
        synced(torch.zeros(1 if rank == 0 else 0, CHANNELS).double())


def training(rank: int, size: int) -> None:
    """A network of several such layers, one of them twice as wide, trained by the optimizer."""

    def network(norm: Any) -> Any:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 6),
            norm(6),
            torch.nn.ReLU(),
            torch.nn.Linear(6, 6),
            norm(6),
            torch.nn.Linear(6, 2),
        ).double()

    model, expected = network(hvd.SyncBatchNorm), network(torch.nn.BatchNorm1d)
    again = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Sum
    )
    alone = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        images = torch.randn(6, 4, dtype=torch.float64)
        optimizer.zero_grad()
        alone.zero_grad()
        model(torch.tensor_split(images, size)[rank]).pow(3).sum().backward()
        expected(images).pow(3).sum().backward()
        optimizer.step()
        alone.step()
    for (name, one), other in zip(model.state_dict().items(), expected.state_dict().values()):
        torch.testing.assert_close(one, other, msg=lambda text: f"{name}: {text}")  # noqa: B023
    with torch.no_grad():
        again(torch.tensor_split(images, size)[rank])


CHECKS = (shapes, options, evaluation, layouts, small_types, a_rank_without_rows, mistakes, training)


def layers() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in CHECKS:
        check(hvd.rank(), hvd.size())
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_layers(n: int) -> None:
    ranks.run(layers, n)
