"""What a program of these checks is, what it knows about its ranks, and values that it compares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Check = Callable[[], Any]
ROUNDING = 1e-5
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "complex64")


@dataclass(frozen=True)
class Program:
    """Checks that the same processes make, one after the other.

    `checks`: yields each check with its name; a check raises if it fails, and may return a text for the table.
    `environ`: for the ranks. `needs_gpu`: not with `--cpu`.
    """

    name: str
    checks: Callable[[], Iterator[tuple[str, Check]]]
    ranks: int
    limit_s: int
    environ: dict[str, str]
    needs_gpu: bool


PROGRAMS: dict[str, Program] = {}


def program(
    name: str, *, ranks: int = 2, limit_s: int = 60, needs_gpu: bool = False, **environ: str
) -> Callable[[Any], Any]:
    """Return a decorator for a function that yields the checks of a program, each with a name."""

    def add(checks: Any) -> Any:
        PROGRAMS[name] = Program(name, checks, ranks, limit_s, environ, needs_gpu)
        return checks

    return add


def my_rank() -> int:
    return int(os.environ["RANK"])


def my_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def on_cpu() -> bool:
    return os.environ["CHECK_DEVICE"] == "cpu"


def place() -> Any:
    return torch.device("cpu") if on_cpu() else torch.device("cuda", 0)


def be_a_host() -> None:
    """Let NCCL take this rank for a host: it accepts no two ranks of a host on one GPU. So they use sockets."""
    os.environ["NCCL_HOSTID"] = f"check-{my_rank()}"


# Values


def given(rank: int, *shape: int, dtype: Any = None) -> Any:
    """Return a tensor of small whole numbers, which every dtype adds and multiplies without rounding."""
    values = torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank))
    return values.to(dtype or torch.float32).to(place())


def all_given(*shape: int, dtype: Any = None) -> Any:
    """Return the tensors of all ranks, along a new first axis."""
    return torch.stack([given(rank, *shape, dtype=dtype) for rank in range(my_size())])


def same(result: Any, expected: Any) -> None:
    """Raise AssertionError unless the tensors are equal bit by bit, and on the same device."""
    close(result, expected, 0.0)


def close(result: Any, expected: Any, tolerance: float = ROUNDING) -> None:
    """Raise AssertionError if the tensors, or lists of them, differ by more than the tolerance."""
    if isinstance(expected, list | tuple):
        assert len(result) == len(expected), f"{len(result)} results, not {len(expected)}"
        for one, other in zip(result, expected):
            close(one, other, tolerance)
        return
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def busy_device() -> None:
    """Give the current stream about a tenth of a second of work, so that what comes later has to wait for it."""
    if not on_cpu():
        torch.cuda._sleep(150_000_000)
