"""Calls that wait for other ranks end when the round is over."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import ronde
from ronde.torch.elastic import bounded_calls
from ronde.torch.elastic.bounded_calls import call_until_over


def not_over() -> None:
    return None


def test_the_result_and_the_error_of_the_call() -> None:
    assert call_until_over(lambda: 7, not_over, not_over) == 7

    def fail() -> None:
        raise ValueError("the address is in use")

    with pytest.raises(ValueError, match="in use"):
        call_until_over(fail, not_over, not_over)


def test_a_wait_that_ends_with_its_connections() -> None:
    closed = threading.Event()

    def wait() -> None:
        closed.wait()
        raise RuntimeError("connection closed by peer")

    with pytest.raises(ronde.PeerLostError, match="rank 1 was killed") as caught:
        call_until_over(wait, lambda: "rank 1 was killed", closed.set)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_wait_that_does_not_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(bounded_calls, "GRACE_S", 0.01)
    lasting = threading.Event()
    with pytest.raises(ronde.PeerLostError, match="rank 1 was killed"):
        call_until_over(lasting.wait, lambda: "rank 1 was killed", not_over)
    lasting.set()
