from __future__ import annotations

import builtins
import os
import socket
import time
from collections.abc import Iterator

import pytest

from ronde.net.descriptors import PER_MESSAGE, receive_descriptors, send_descriptors


@pytest.fixture
def lane() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize("count", [1, 3, PER_MESSAGE, PER_MESSAGE + 1])
def test_descriptors_arrive_in_order_and_close_on_exec(
    lane: tuple[socket.socket, socket.socket], count: int
) -> None:
    mine = [os.eventfd(number) for number in range(1, count + 1)]
    send_descriptors(lane[0], mine, None)
    theirs = receive_descriptors(lane[1], count, None)
    assert [os.eventfd_read(fd) for fd in theirs] == list(range(1, count + 1))
    assert not any(os.get_inheritable(fd) for fd in theirs)
    for fd in mine + theirs:
        os.close(fd)


def test_none_is_a_message_too(lane: tuple[socket.socket, socket.socket]) -> None:
    send_descriptors(lane[0], [], None)
    assert receive_descriptors(lane[1], 2, None) == []


def test_a_lost_or_silent_sender(lane: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(builtins.TimeoutError):
        receive_descriptors(lane[1], 1, time.monotonic_ns() + 10**7)
    fd = os.eventfd(0)
    send_descriptors(lane[0], [fd], None)
    os.close(fd)
    lane[0].close()
    with pytest.raises(ConnectionError):
        receive_descriptors(lane[1], 2, None)
