"""What an error keeps alive: the frames of whoever has caught it, and nothing once that is forgotten."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks


class Large:
    """Stands for what a training step has in its local variables."""


def fails_in_wait(name: str, remembered: list[weakref.ref[Large]]) -> None:
    large = Large()
    remembered.append(weakref.ref(large))
    handle = ronde.allreduce_async(np.ones(3 + ronde.rank()), name=name)
    for _ in range(2):  # waiting again raises the same
        with pytest.raises(ronde.MismatchError, match=name):
            handle.wait()


def fails_at_once(name: str, remembered: list[weakref.ref[Large]]) -> None:
    large = Large()
    remembered.append(weakref.ref(large))
    with pytest.raises(ronde.MismatchError, match=name):
        ronde.allreduce(np.ones(3 + ronde.rank()), name=name)


def fails_after_the_end(name: str, remembered: list[weakref.ref[Large]]) -> None:
    large = Large()
    remembered.append(weakref.ref(large))
    with pytest.raises(ronde.PeerError):
        ronde.allreduce(np.ones(3), name=name)


def fail_again_and_again() -> list[str]:
    """Returns which failures have left their callers' local variables alive, with the cycle collector off."""
    ronde.init()
    gc.disable()
    kept = []

    def check(fail: Callable[[str, list[weakref.ref[Large]]], None]) -> None:
        remembered: list[weakref.ref[Large]] = []
        for number in range(3):
            fail(f"gradient {number}", remembered)
        alive = sum(each() is not None for each in remembered)
        if alive:
            kept.append(f"{fail.__name__}: {alive} of {len(remembered)}")

    check(fails_in_wait)
    check(fails_at_once)
    ronde.world().barrier()
    if ronde.rank() == 1:
        ronde.shutdown()
        return kept
    check(fails_after_the_end)
    ronde.shutdown()
    return kept


def test_a_caught_error_keeps_no_local_variables() -> None:
    assert ranks.run(fail_again_and_again, 2) == [[], []]


def attach_handles_to_their_tensors() -> int:
    class Tensor(np.ndarray[Any, Any]):
        handle: Any

    ronde.init()
    tensor = np.ones(3).view(Tensor)
    tensor.handle = ronde.allreduce_async(tensor, name="a", out=tensor)
    assert tensor.handle.wait() is tensor
    remembered = weakref.ref(tensor)
    del tensor
    gc.collect()
    ronde.shutdown()
    return int(remembered() is not None)


def test_a_tensor_that_holds_its_own_handle_is_collected() -> None:
    assert ranks.run(attach_handles_to_their_tensors, 1) == [0]
