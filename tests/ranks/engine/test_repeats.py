"""Names that are submitted again and again: one native call submits the next tensor, if it is like the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.engine import engine
from ronde.errors import UsageError
from ronde.testing import ranks


def sum_of(x: Any, out: Any = None) -> Any:
    return ronde.allreduce(x, "sum", op=ronde.Sum, out=out)


def repeat_until_known(x: Any) -> None:
    for _ in range(3):
        sum_of(x)
    assert "sum" in engine()._repeats


def check_arrays(ones: Callable[[int], Any]) -> None:
    """Every rank contributes `rank + 1` in arrays of four elements, which differ in all that a caller can vary."""
    total = sum(range(1, ronde.size() + 1))
    x = ones(4) * (ronde.rank() + 1)
    repeat_until_known(x)
    new = sum_of(x)
    assert (type(new), new.dtype) == (type(x), x.dtype)
    assert new is not x
    assert new.tolist() == [total] * 4
    assert x.tolist() == [ronde.rank() + 1] * 4
    strided = ones(8)[::2]
    assert sum_of(strided).tolist() == [ronde.size()] * 4
    other = ones(4)
    assert sum_of(x, other) is other
    assert other.tolist() == [total] * 4
    wide = ones(8)
    assert sum_of(x, wide[::2]).tolist() == [total] * 4
    assert wide[1::2].tolist() == [1] * 4
    with pytest.raises(UsageError, match="shape"):
        sum_of(x, ones(5))
    line = ones(6)
    with pytest.raises(UsageError, match="overlaps"):
        sum_of(line[:4], line[1:5])
    assert ronde.allreduce(x, "sum", op=ronde.Max).tolist() == [ronde.size()] * 4
    assert sum_of(ones(3)).tolist() == [ronde.size()] * 3
    assert sum_of(x.reshape(2, 2)).tolist() == [[total] * 2] * 2
    repeat_until_known(x)
    assert sum_of(x, x) is x
    assert x.tolist() == [total] * 4


def check_in_flight(x: Any) -> None:
    """Rank 0 submits the tensor twice while the other ranks have not submitted it."""
    if ronde.size() == 1:
        return
    if ronde.rank() == 0:
        handle = ronde.allreduce_async(x, "sum", op=ronde.Sum)
        with pytest.raises(ValueError, match="in flight"):
            sum_of(x)
        ronde.barrier()
        handle.wait()
    else:
        ronde.barrier()
        sum_of(x)


def repeat_numpy() -> str:
    ronde.init()
    check_arrays(np.ones)
    x = np.ones(4)
    repeat_until_known(x)
    x.flags.writeable = False
    assert sum_of(x).tolist() == [ronde.size()] * 4
    with pytest.raises(UsageError, match="read-only"):
        sum_of(x, x)
    with pytest.raises(UsageError, match="byte order"):
        sum_of(np.ones(4, ">f8"))
    check_in_flight(x)
    assert ronde.allreduce(2.0, "number", op=ronde.Sum) == ronde.allreduce(2.0, "number", op=ronde.Sum)
    for _ in range(4):
        assert (
            ronde.broadcast(np.full(4, ronde.rank()), ronde.size() - 1, "root").tolist()
            == [ronde.size() - 1] * 4
        )
    ronde.shutdown()
    with pytest.raises(ronde.NotInitializedError):
        sum_of(x)
    return "done"


def repeat_torch() -> str:
    import torch

    ronde.init()
    check_arrays(lambda count: torch.ones(count, dtype=torch.float64))
    x = torch.ones(4, dtype=torch.complex64) * 1j
    repeat_until_known(x)
    assert sum_of(x.conj()).tolist() == [-1j * ronde.size()] * 4
    imaginary = torch.full((1,), 1j).conj().imag
    assert (imaginary.is_neg(), imaginary.is_contiguous()) == (True, True)
    for _ in range(3):
        sum_of(torch.ones(1))
    assert sum_of(imaginary).tolist() == [-ronde.size()]
    weight = torch.nn.Parameter(torch.ones(4))
    for _ in range(4):
        assert not sum_of(weight).requires_grad
    assert sum_of(np.ones(4, np.float32)).tolist() == [ronde.size()] * 4
    ronde.shutdown()
    return "done"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("program", [repeat_numpy, repeat_torch])
def test_arrays_that_differ_under_a_known_name(program: Callable[[], str], n: int) -> None:
    if program is repeat_torch:
        pytest.importorskip("torch")
    assert ranks.run(program, n) == ["done"] * n


def take_back_repeats() -> list[float]:
    """Rank 0 changes the shape while a repeat of rank 1 is pending, and the other way round."""
    ronde.init()
    sums = []
    for turn in range(4):
        repeat_until_known(np.ones(4))
        if turn % 2 == ronde.rank():
            handle = ronde.allreduce_async(np.ones(4), "sum", op=ronde.Sum)
            sums.append(float(sum_of_other()))
            with pytest.raises(ronde.MismatchError, match="sum"):
                handle.wait()
        else:
            sums.append(float(sum_of_other()))
            with pytest.raises(ronde.MismatchError, match="sum"):
                sum_of(np.ones(5))
    ronde.shutdown()
    return sums


def sum_of_other() -> Any:
    return ronde.allreduce(np.ones(()), "other", op=ronde.Sum)


def test_a_repeat_that_meets_another_shape() -> None:
    assert ranks.run(take_back_repeats, 2) == [[2.0] * 4] * 2


def test_not_finite_numbers_are_found_in_repeats() -> None:
    ranks.run(refuse_nan, 1, environ={"RONDE_CHECK_FINITE": "raise"})


def refuse_nan() -> None:
    ronde.init()
    for _ in range(3):
        sum_of(np.ones(4))
    with pytest.raises(ronde.AbortedError, match="nan"):
        sum_of(np.full(4, np.nan))
