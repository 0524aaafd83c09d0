"""What gives the same bits whatever a tensor is fused with: every reduction where docs/engine.md says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

TENSORS = 30


def tensors(dtype: str) -> list[np.ndarray[Any, Any]]:
    """Of many lengths; some of them too large to be fused on one host."""
    rng = np.random.default_rng([ronde.rank(), np.dtype(dtype).itemsize])
    lengths = np.random.default_rng(7).integers(1, 9000, TENSORS).tolist()
    return [rng.normal(size=length).astype(dtype) for length in [*lengths, 40_000]]


def reduce_alone_and_together() -> list[str]:
    """Returns what differs from the same tensor when it ran alone."""
    ronde.init()
    different = []
    for dtype, op in (
        ("float32", ronde.Sum),
        ("float16", ronde.Average),
        ("float64", ronde.Product),
        ("float64", ronde.Adasum),
    ):
        given = tensors(dtype)
        alone = [ronde.allreduce(x, f"{dtype} {op} {i}", op).copy() for i, x in enumerate(given)]
        for turn in range(3):
            handles = [ronde.allreduce_async(x, f"{dtype} {op} {i}", op) for i, x in enumerate(given)]
            for i, handle in enumerate(handles):
                if handle.wait().tobytes() != alone[i].tobytes():
                    different.append(f"{op.name} of {dtype}, tensor {i}, turn {turn}")
    ronde.shutdown()
    return different


@pytest.mark.parametrize(
    ("hosts", "algorithm"),
    [
        pytest.param("aaaa", "auto", marks=pytest.mark.slow),
        ("abcd", "direct"),
        pytest.param("aabb", "direct", marks=pytest.mark.slow),
    ],
)
def test_what_a_tensor_is_fused_with_changes_no_bit(hosts: str, algorithm: str) -> None:
    environ = {"RONDE_ALLREDUCE_ALGORITHM": algorithm, "RONDE_LINGER": "0.02"}
    places = [ranks.Place(environ={"RONDE_HOST_ID": host, **environ}) for host in hosts]
    with ranks.start(reduce_alone_and_together, len(hosts), places=places) as job:
        assert job.results() == [[]] * len(hosts)
