"""Default groups of torch.distributed for tests, and operations with the results that they must have.

A test's ranks meet in a folder that the test passes to them: each default group in a new file of it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ronde.torch.distributed  # noqa: F401, registers the backend

BACKENDS = ("gloo", "ronde")
Result = TypeVar("Result")


@contextmanager
def default_group(folder: str, backend: str = "ronde", timeout_s: float = 60) -> Iterator[tuple[int, int]]:
    """Make the default group of this rank for the block, and return rank and size."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(_new_file(folder, rank), size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield rank, size
    finally:
        dist.destroy_process_group()


def _new_file(folder: str, rank: int) -> str:
    """Return a file name that all ranks get which have called this equally often."""
    count = 0
    while os.path.exists(f"{folder}/{count}.{rank}"):
        count += 1
    with open(f"{folder}/{count}.{rank}", "x"):
        return f"{folder}/{count}"


def with_each_backend(folder: str, program: Callable[..., Result], *args: Any) -> dict[str, Result]:
    """Return the results of `program(*args)` by backend, each within a default group of it."""
    results = {}
    for backend in BACKENDS:
        with default_group(folder, backend):
            results[backend] = program(*args)
    return results


def mesh_of(*shape: int, names: tuple[str, ...] = ()) -> Any:
    """Return a mesh of the ranks whose groups have the backend of the default group.

    PyTorch gives the groups of a mesh on CPUs the backend Gloo unless it is told.
    """
    backend = dist.get_backend()
    has_override = (
        "backend_override" in inspect.signature(init_device_mesh).parameters
    )  # PyTorch 2.9 and later
    how = {"backend_override": dict.fromkeys(range(len(shape)), backend)} if has_override else {}
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None, **how)


def same(results: Any, expected: Any) -> None:
    """Compare tensors, or nested lists of them, bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert results.dtype == expected.dtype
        assert torch.equal(results, expected), f"{results}, not {expected}"
        return
    assert len(results) == len(expected)
    for one, other in zip(results, expected):
        same(one, other)


def close(results: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Compare tensors, or nested lists of them, but for the rounding of sums in another order."""
    torch.testing.assert_close(results, expected, rtol=tolerance, atol=tolerance)
