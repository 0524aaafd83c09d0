"""Arrays in, arrays of the same kind out: mypy checks what the types say, and the program that it is so."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import ronde
from ronde.testing import ranks


def numpy_arrays() -> None:
    ronde.init()
    world = ronde.world()
    x: NDArray[np.float32] = np.ones(3, np.float32)
    results = [
        assert_type(world.allreduce(x), NDArray[np.float32]),
        assert_type(world.reducescatter(x, op=ronde.Max), NDArray[np.float32]),
        assert_type(world.alltoall(x, [3]), NDArray[np.float32]),
        assert_type(ronde.allreduce(x, "mean", postscale_factor=2.0, out=x), NDArray[np.float32]),
        assert_type(ronde.reducescatter(x), NDArray[np.float32]),
        assert_type(ronde.allgather_async(x).wait(), NDArray[np.float32]),
        assert_type(ronde.synchronize(ronde.broadcast_async(x)), NDArray[np.float32]),
        *assert_type(ronde.grouped_allreduce([x, x]), list[NDArray[np.float32]]),
        *assert_type(ronde.grouped_allgather_async([x]).wait(), list[NDArray[np.float32]]),
    ]
    at_root = assert_type(world.gather(x, 0), NDArray[np.float32] | None)
    assert all(type(each) is np.ndarray and each.dtype == np.float32 for each in [*results, at_root])
    ronde.shutdown()


def numbers() -> None:
    """A number is not an array: it gives a NumPy array without axes."""
    ronde.init()
    world = ronde.world()
    results = [
        assert_type(world.allreduce(0.5), NDArray[Any]),
        assert_type(world.broadcast(np.float32(2)), NDArray[Any]),
        assert_type(ronde.allreduce(7, op=ronde.Sum), NDArray[Any]),
        assert_type(ronde.allgather(1j), NDArray[Any]),
        assert_type(ronde.broadcast(True), NDArray[Any]),
    ]
    assert all(type(each) is np.ndarray for each in results)
    assert [each.size for each in results] == [1] * 5
    ronde.shutdown()


def objects() -> None:
    """Ranks other than the root may pass None: it is not among the types of what they get."""
    ronde.init()
    config = {"depth": 3} if ronde.rank() == 0 else None
    assert assert_type(ronde.broadcast_object(config), dict[str, int]) == {"depth": 3}
    assert assert_type(ronde.allgather_object("a"), list[str]) == ["a"]
    ronde.shutdown()


def tensors() -> None:
    import torch

    import ronde.torch as hvd

    hvd.init()
    x = torch.ones(3)
    results = [
        ronde.allreduce(x),
        hvd.allreduce(x),
        hvd.synchronize(hvd.allreduce_async_(x)),
        hvd.alltoall(x),
        *hvd.alltoall(x, [3]),
        *hvd.grouped_reducescatter([x, x]),
    ]
    assert all(type(each) is torch.Tensor for each in results)
    handle: ronde.Handle[torch.Tensor] = ronde.allreduce_async(x)
    assert type(handle.wait()) is torch.Tensor
    assert str(ronde.Handle[int]) == "ronde._native.Handle[int]"
    # NumPy has no such arrays.
    with pytest.raises(ronde.UsageError, match="scatter takes arrays of up to 64 axes, not 65"):
        ronde.world().scatter(torch.ones([1] * 65))
    assert ronde.world().scatter(torch.ones([1] * 64)).shape == (1,) * 64
    hvd.shutdown()


@pytest.mark.parametrize("program", [numpy_arrays, numbers, objects])
def test_what_the_types_say_is_returned(program: Any) -> None:
    ranks.run(program, 1)


def test_tensors_give_tensors() -> None:
    pytest.importorskip("torch")
    ranks.run(tensors, 1)
