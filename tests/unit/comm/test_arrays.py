"""The border of arrays alone: which output may be given beside an input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ronde.comm.arrays import operand, overlap, target
from ronde.errors import UsageError


def test_an_output_beside_its_input_is_taken_and_one_across_it_is_refused() -> None:
    torch: Any = pytest.importorskip("torch")
    x = torch.arange(8.0)
    assert target(operand(x[:4]), (4,), x[4:]).result.tolist() == [4, 5, 6, 7]
    assert target(operand(x[4:]), (4,), x[:4]).result.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="out overlaps the input"):
        target(operand(x[:4]), (4,), x[3:7])


def test_an_array_and_a_tensor_of_its_memory_overlap() -> None:
    torch: Any = pytest.importorskip("torch")
    x = np.arange(8.0)
    assert overlap(torch.from_numpy(x[:5]), x[4:])
    assert not overlap(torch.from_numpy(x[:4]), x[4:])
