"""PyTorch tensors go in and come out: every type, layout and operation."""

from __future__ import annotations

from typing import Any

import pytest

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")

INTEGERS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


def same(result: Any, expected: Any) -> None:
    """The same tensor in values, type and shape; nothing that autograd would follow."""
    assert isinstance(result, torch.Tensor), type(result)
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert not result.requires_grad or result.is_leaf
    assert torch.equal(result.detach().to(torch.complex128), expected.detach().to(torch.complex128))


def numbers(dtype: str, rank: int) -> Any:
    """A 4 x 3 tensor of small numbers, different on each rank."""
    return (torch.arange(12).reshape(4, 3) % 5 + rank).to(getattr(torch, dtype))


def every_type(world: Any) -> None:
    for dtype in ("bool", *INTEGERS, *FLOATS, *COMPLEX):
        mine, all_of_them = numbers(dtype, world.rank), [numbers(dtype, rank) for rank in range(world.size)]
        total = sum(x.to(torch.complex128) for x in all_of_them)
        total = total.real if not mine.is_complex() else total
        same(world.allreduce(mine), total.to(mine.dtype))
        same(world.allgather(mine), torch.cat(all_of_them))
        same(world.broadcast(mine, root=1), all_of_them[1])
        if dtype in FLOATS:
            same(world.allreduce(mine, op=ronde.Average), (total / world.size).to(mine.dtype))


def every_operation(world: Any) -> None:
    x = numbers("float32", world.rank)
    all_of_them = [numbers("float32", rank) for rank in range(world.size)]
    total, share = sum(all_of_them), slice(world.rank * 2, world.rank * 2 + 2)
    same(world.reducescatter(x), total[share])
    same(world.alltoall(x), torch.cat([other[share] for other in all_of_them]))
    if world.rank == 1:
        same(world.reduce(x, root=1), total)
        same(world.gather(x, root=1), torch.cat(all_of_them))
        same(world.scatter(x, root=1), x[2:])
        world.send(x.t(), 0)
    else:
        assert world.reduce(x, root=1) is None
        assert world.gather(x, root=1) is None
        part = torch.zeros(2, 3)
        assert world.scatter(root=1, out=part) is part
        same(part, all_of_them[1][:2])
        received = torch.zeros(4, 3).t()
        assert world.recv(received, 1) is received
        same(received, all_of_them[1].t())


def every_layout(world: Any) -> None:
    base = torch.arange(24.0).reshape(4, 6) + world.rank
    for view in (
        base.t(),
        base[:, ::2],
        base[1, 2],
        base[:0],
        base[:1].expand(3, 6),
        base.to(torch.bfloat16).t(),
    ):
        others = [view - world.rank + rank for rank in range(world.size)]
        same(world.allreduce(view), sum(others))
        same(world.broadcast(view, root=1), others[1])
    turned = (base + 1j * base).conj()
    same(world.broadcast(turned, root=0), turned - world.rank * (1 - 1j))
    same(world.broadcast(turned.imag, root=0), -(base - world.rank))
    # Conjugated and negated tensors are contiguous, but their values are not those in memory.
    assert (turned.is_conj(), turned.is_contiguous()) == (True, True)
    total = sum(base - world.rank + rank for rank in range(world.size))
    same(world.allreduce(turned), total * (1 - 1j))
    assert turned[0, :1].imag.is_neg()
    same(world.allreduce(turned[0, :1].imag), -total[0, :1])
    rows = torch.tensor_split(total * (1 - 1j), world.size)
    same(world.reducescatter(turned), rows[world.rank])
    everyones = [(base - world.rank + rank) * (1 - 1j) for rank in range(world.size)]
    same(world.allgather(turned), torch.cat(everyones))
    part = torch.zeros_like(rows[world.rank])
    assert world.scatter(turned, root=1, out=part) is part
    same(part, torch.tensor_split(everyones[1], world.size)[world.rank])
    parts = [torch.tensor_split(each, world.size)[world.rank] for each in everyones]
    same(world.alltoall(turned), torch.cat(parts))
    gathered, summed = world.gather(turned, root=0), world.reduce(turned, root=0)
    if world.rank == 0:
        same(gathered, torch.cat(everyones))
        same(summed, total * (1 - 1j))
    for out in (torch.zeros_like(base + 1j).conj(), torch.zeros(1, dtype=torch.complex64).conj().imag):
        x = base[0, :1] if out.shape == (1,) else base + 0j
        assert world.allreduce(x, out=out) is out
        same(out, total[0, :1] if out.shape == (1,) else total + 0j)
    assert world.allreduce(turned, out=turned) is turned
    same(turned, total * (1 - 1j))


def outputs(world: Any) -> None:
    for dtype in ("float32", "bfloat16", "uint16"):
        x = numbers(dtype, world.rank)
        total = (2 * numbers("int64", 0) + 1).to(x.dtype)
        wide = torch.zeros(4, 6, dtype=x.dtype)
        for out in (torch.zeros_like(x), torch.zeros(3, 4, dtype=x.dtype).t(), wide[:, ::2]):
            assert world.allreduce(x, out=out) is out
            same(out, total)
        assert world.broadcast(x, root=1, out=x) is x
        same(x, numbers(dtype, 1))
        assert world.allreduce(x, out=x) is x
        same(x, (2 * numbers("int64", 1)).to(x.dtype))
    with pytest.raises(ronde.UsageError, match="out holds float64 values"):
        world.allreduce(torch.zeros(3), out=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ronde.UsageError, match=r"out has shape \(4,\)"):
        world.allreduce(torch.zeros(3), out=torch.zeros(4))


def parameters(world: Any) -> None:
    """Tensors that require gradients are read and, as `out`, written like others; no result is part of a graph."""
    weights = torch.full((3,), float(world.rank), requires_grad=True)
    same(world.allreduce(weights), torch.ones(3))
    same(world.allgather(weights), torch.tensor([0.0, 0, 0, 1, 1, 1]))
    for root in (0, 1):
        result = world.broadcast(weights, root)
        same(result, torch.full((3,), float(root)))
        assert not result.requires_grad
    same(world.allreduce(2 * weights), torch.full((3,), 2.0))
    assert world.broadcast(weights, root=1, out=weights) is weights
    same(weights, torch.ones(3))
    assert weights.is_leaf
    assert world.allreduce(weights, out=weights) is weights
    same(weights, torch.full((3,), 2.0))


def symmetric_memory(world: Any) -> None:
    x = torch.from_numpy(world.empty((2, 3)))
    x.fill_(world.rank)
    assert world.allreduce(x, out=x) is x
    same(x, torch.ones(2, 3))


def refused(world: Any) -> None:
    with pytest.raises(ronde.UsageError, match="the tensor is on meta; move it to the CPU first"):
        world.allreduce(torch.zeros(3, device="meta"))
    with pytest.raises(ronde.UsageError, match="only dense tensors are supported"):
        world.allreduce(torch.zeros(3).to_sparse())
    with pytest.raises(
        ronde.UsageError,
        match="dtype float8_e5m2 of the Tensor is not supported; convert it to bool",
    ):
        world.allreduce(torch.zeros(3, dtype=torch.float8_e5m2))


def tensors() -> None:
    ronde.init()
    for check in (every_type, every_operation, every_layout, outputs, parameters, symmetric_memory, refused):
        check(ronde.world())
    ronde.shutdown()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_tensors(transport: str) -> None:
    ranks.run(tensors, 2, environ={"RONDE_TRANSPORT": transport})
