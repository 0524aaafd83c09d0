"""RONDE_CHECK_FINITE: the first NaN or infinity, with its rank, tensor, count of submissions and index."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest

import ronde
from ronde.comm.arrays import operand
from ronde.engine import engine
from ronde.engine.submission import first_not_finite
from ronde.testing import ranks


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64"])
def test_the_first_that_is_not_finite_is_found(dtype: str) -> None:
    for size in (1, 7, 2**15 + 3):
        x = np.ones(size, dtype)
        assert first_not_finite(operand(x)) == -1
        for index in {0, size // 2, size - 1}:
            for value in (np.nan, np.inf, -np.inf):
                bad = x.copy()
                bad[[index, size - 1]] = value
                assert first_not_finite(operand(bad)) == index
    assert first_not_finite(operand(np.ones(3, np.int32))) == -1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_a_tensor_of_pytorch_is_checked_too(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 4, dtype=getattr(torch, dtype), requires_grad=True)
    assert first_not_finite(operand(x)) == -1
    with torch.no_grad():
        x[1, 2] = float("inf")
    assert first_not_finite(operand(x)) == 6


def meet_a_nan() -> str:
    """Submit a NaN on rank 1 in the third step; return this rank's warnings and error."""
    ronde.init()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ronde.engine").addHandler(handler)
    x = np.ones((4, 5), np.float32)
    try:
        for step in range(5):
            if step == 2 and ronde.rank() == 1:
                x[2, 3] = np.nan
            ronde.allreduce(x, "gradient")
            ronde.allreduce(np.full(3, 7), "whole numbers")
    except ronde.AbortedError as error:
        messages.append(str(error))
    ronde.shutdown()
    return " | ".join(messages)


FOUND = "tensor 'gradient' has nan at [2, 3] on rank 1 on "


def test_raise_tells_every_rank_which_rank_tensor_and_step_it_was() -> None:
    for told in ranks.run(meet_a_nan, 2, environ={"RONDE_CHECK_FINITE": "raise"}):
        assert FOUND in told
        assert "for the 3rd time" in told


def test_warn_tells_once_and_goes_on() -> None:
    first, second = ranks.run(meet_a_nan, 2, environ={"RONDE_CHECK_FINITE": "warn"})
    assert first == ""  # NaN of another rank arrives there, but only in results
    assert second.count(FOUND) == 1


def meet_others(way: str) -> str:
    """Submit a NaN on rank 1 in another way than by an all-reduce; return this rank's error."""
    try:
        ronde.init()  # a rank that is slow may still be in here when the other one ends the job
        x = np.ones(4, np.float16)
        x[3] = np.inf if ronde.rank() == 1 else 1
        if way == "group":
            ronde.grouped_allreduce([np.ones(2), x], "gradients")
        elif way == "prepared":
            engine().prepare(x, "gradient", ronde.Sum, 1.0, 1.0)(True).wait()
        else:
            ronde.broadcast(x, root=0)
    except ronde.AbortedError as error:
        return str(error)
    finally:
        ronde.shutdown()
    return ""


@pytest.mark.parametrize(
    ("way", "found"),
    [
        ("group", "array 1 of the group 'gradients' has inf at [3] on rank 1 on "),
        ("prepared", "tensor 'gradient' has inf at [3] on rank 1 on "),
        ("broadcast", ""),  # the root's values replace those of rank 1
    ],
)
def test_every_way_to_submit_is_checked(way: str, found: str) -> None:
    for told in ranks.run(meet_others, 2, way, environ={"RONDE_CHECK_FINITE": "raise"}):
        assert found in told
        assert bool(told) == bool(found)


def test_off_is_the_default() -> None:
    assert ranks.run(meet_a_nan, 2) == ["", ""]
