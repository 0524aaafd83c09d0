"""Waiting for an operation that is interrupted before it has begun."""

from __future__ import annotations

import pathlib
import sys
import time
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.engine.engine import Engine
from ronde.testing import ranks

PATIENCE_S = 60.0


def reduce_interrupted(x: Any) -> None:
    """Raise KeyboardInterrupt where the engine has got the tensor and the wait has not begun."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return" and frame.f_code is Engine.submit.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    ronde.allreduce(x, "x", op=ronde.Sum)


def submit_last_and_be_interrupted(folder: str) -> bool:
    """Return whether rank 1 gets its result although rank 0, which submits last, does not wait for its own."""
    ronde.init()
    is_done = pathlib.Path(folder) / "done"
    x = np.ones(4)
    for _ in range(3):
        ronde.allreduce(x, "x", op=ronde.Sum)  # now it is cached
    ronde.world().barrier()
    if ronde.rank() == 1:
        assert (ronde.allreduce(x, "x", op=ronde.Sum) == 2).all()
        is_done.touch()
        return True
    time.sleep(0.3)  # rank 1 waits
    with pytest.raises(KeyboardInterrupt):
        reduce_interrupted(x)
    end_s = time.monotonic() + PATIENCE_S
    while not is_done.exists() and time.monotonic() < end_s:
        time.sleep(0.01)  # the program goes on without the engine
    return is_done.exists()


def test_an_interrupt_between_submission_and_wait_keeps_no_rank_waiting(tmp_path: pathlib.Path) -> None:
    assert ranks.run(submit_last_and_be_interrupted, 2, str(tmp_path)) == [True, True]
