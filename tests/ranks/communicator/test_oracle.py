"""Every operation on arrays of every type, shape and layout, against NumPy, on 1 to 4 ranks."""

from __future__ import annotations

import pytest
from tests.ranks.communicator import oracle

from ronde.testing import ranks

FEW, MANY = 4, 100  # examples per operation

WORLDS = pytest.mark.parametrize(
    ("n", "transport"), [(1, "auto"), *((n, transport) for n in (2, 3, 4) for transport in ("auto", "tcp"))]
)


@WORLDS
def test_all_operations_agree_with_numpy(n: int, transport: str) -> None:
    compared = ranks.run(oracle.agrees_with_numpy, n, FEW, environ={"RONDE_TRANSPORT": transport})
    assert compared == [FEW * len(oracle.OPERATIONS)] * n


@pytest.mark.slow
@WORLDS
def test_all_operations_agree_with_numpy_in_many_cases(n: int, transport: str) -> None:
    ranks.run(oracle.agrees_with_numpy, n, MANY, environ={"RONDE_TRANSPORT": transport}, timeout_s=280)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["direct", "ring", "doubling", "hierarchical"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_algorithm_agrees_with_numpy(algorithm: str, transport: str) -> None:
    environ = {"RONDE_TRANSPORT": transport, "RONDE_ALLREDUCE_ALGORITHM": algorithm}
    ranks.run(oracle.agrees_with_numpy, 4, MANY, ["allreduce", "allreduce_in_place"], environ=environ)
