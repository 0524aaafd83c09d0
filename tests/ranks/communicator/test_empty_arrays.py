"""Arrays without elements, whatever their strides: PyTorch and NumPy make some whose strides are 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

SHAPES_AND_STRIDES = [((0,), (0,)), ((0, 3), (0, 0)), ((4, 0), (0, 0)), ((4, 0), (5, 7))]


def numpy_array(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return np.lib.stride_tricks.as_strided(np.empty(0, np.float32), shape, strides)


def tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    import torch

    return torch.as_strided(torch.empty(0), shape, strides)


def use(make: Callable[..., Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Use such an array in all operations, with and without `out`."""
    world: Any = ronde.world()
    x, other = make(shape, strides), make(shape, strides)
    rows = (shape[0] * world.size, *shape[1:])
    share = (shape[0] // world.size, *shape[1:])
    name = f"{shape} {strides}"
    for out in (None, x, other):
        assert world.allreduce(x, out=out).shape == shape
        assert world.broadcast(x, 0, out=out).shape == shape
        assert world.broadcast(x, 1, out=out).shape == shape
        reduced = world.reduce(x, 0, out=out if world.rank == 0 else None)
        assert reduced is None or reduced.shape == shape
        assert ronde.allreduce(x, name=f"allreduce {name}", out=out).shape == shape
        assert ronde.broadcast(x, 1, name=f"broadcast {name}", out=out).shape == shape
    gathered = world.gather(x, 1)
    assert gathered is None or gathered.shape == rows
    assert world.allgather(x).shape == ronde.allgather(x, name=f"allgather {name}").shape == rows
    assert world.scatter(x if world.rank == 0 else None, 0).shape == share
    assert world.reducescatter(x).shape == share
    assert ronde.reducescatter(x, name=f"reducescatter {name}").shape == share
    assert world.alltoall(x).shape == world.alltoall(x, splits=[share[0]] * 2).shape == shape
    assert ronde.alltoall(x, name=f"alltoall {name}").shape == shape
    group = ronde.grouped_allreduce([x, other], name=f"group {name}")
    assert [each.shape for each in group] == [shape, shape]
    if world.rank == 0:
        world.send(x, 1)
    else:
        world.recv(other, 0)


def use_all(make: Callable[..., Any]) -> None:
    ronde.init()
    for shape, strides in SHAPES_AND_STRIDES:
        use(make, shape, strides)


@pytest.mark.parametrize("make", [numpy_array, tensor])
def test_every_operation_takes_empty_arrays(make: Callable[..., Any]) -> None:
    if make is tensor:
        pytest.importorskip("torch")
    ranks.run(use_all, 2, make)
