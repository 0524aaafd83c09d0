"""Waiting for an operation: interrupted before it has begun, by two threads, and with an error on the way."""

from __future__ import annotations

import pathlib
import sys
import threading
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


class SlowArray(np.ndarray[Any, Any]):
    """Takes long to be written, and fails as often as `errors` says."""

    errors = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        time.sleep(0.5)
        if self.errors > 0:
            self.errors -= 1
            raise KeyboardInterrupt
        super().__setitem__(key, value)


def slow_array(count: int) -> SlowArray:
    return np.zeros(2 * count)[::2].view(SlowArray)  # not contiguous, so the result is copied to it


def wait_in_two_threads() -> list[bool]:
    """Return what each thread sees after its wait: whether the result is complete."""
    ronde.init()
    out = slow_array(1000)
    handle = ronde.allreduce_async(np.ones(1000), "x", op=ronde.Sum, out=out)
    complete = []

    def wait() -> None:
        handle.wait()
        complete.append(bool((np.asarray(out) == 2).all()))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return complete


def test_every_waiting_thread_gets_the_complete_result() -> None:
    assert ranks.run(wait_in_two_threads, 2) == [[True, True], [True, True]]


def interrupt_the_copy() -> bool:
    ronde.init()
    out = slow_array(1000)
    out.errors = 1
    handle = ronde.allreduce_async(np.ones(1000), "x", op=ronde.Sum, out=out)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    return bool((np.asarray(handle.wait()) == 2).all())


def test_a_wait_after_an_interrupted_one_completes_the_result() -> None:
    assert ranks.run(interrupt_the_copy, 2) == [True, True]
