from __future__ import annotations

import builtins
import socket
import time
from collections.abc import Iterator

import pytest

from ronde.net.authentication import receive_some, send_all


def soon() -> int:
    return time.monotonic_ns() + 30 * 10**9


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_what_has_arrived_is_returned_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    send_all(pair[0], b"first", soon())
    assert receive_some(pair[1], 3, soon()) == b"fir"
    assert receive_some(pair[1], 10, None) == b"st"


def test_the_end_of_the_stream(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed by the other end"):
        receive_some(pair[1], 3, soon())


@pytest.mark.parametrize("ahead_ns", [-1, 10**7])
def test_the_deadline(pair: tuple[socket.socket, socket.socket], ahead_ns: int) -> None:
    with pytest.raises(builtins.TimeoutError):
        receive_some(pair[0], 1, time.monotonic_ns() + ahead_ns)
    with pytest.raises(builtins.TimeoutError):
        send_all(pair[0], b"x" * 10**7, time.monotonic_ns() + ahead_ns)
