from __future__ import annotations

import builtins
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.errors import ProtocolError
from ronde.net.frames import FrameReader, frame, receive_exactly, receive_frame, send_all


def soon() -> int:
    return time.monotonic_ns() + 30 * 10**9


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@given(st.lists(st.binary(max_size=30), max_size=10), st.lists(st.integers(1, 20), min_size=1))
def test_payloads_survive_any_cutting(payloads: list[bytes], cuts: list[int]) -> None:
    stream, reader, read = b"".join(map(frame, payloads)), FrameReader(30), []
    while stream:
        for cut in cuts:
            read += reader.feed(stream[:cut])
            stream = stream[cut:]
    assert read == payloads


def test_a_frame_above_the_limit_is_refused_at_its_length() -> None:
    assert FrameReader(5).feed(frame(b"12345")) == [b"12345"]
    with pytest.raises(ProtocolError, match="a frame of 6 bytes came where at most 5 are allowed"):
        FrameReader(5).feed(frame(b"123456")[:4])


def test_over_a_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    send_all(pair[0], frame(b"first") + frame(b"") + frame(b"long"), soon())
    assert receive_frame(pair[1], 5, soon()) == b"first"
    assert receive_frame(pair[1], 5, None) == b""
    with pytest.raises(ProtocolError):
        receive_frame(pair[1], 3, soon())


def test_the_end_of_the_stream(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(b"ab")
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed by the other end"):
        receive_exactly(pair[1], 3, soon())


@pytest.mark.parametrize("ahead_ns", [-1, 10**7])
def test_the_deadline(pair: tuple[socket.socket, socket.socket], ahead_ns: int) -> None:
    with pytest.raises(builtins.TimeoutError):
        receive_exactly(pair[0], 1, time.monotonic_ns() + ahead_ns)
    with pytest.raises(builtins.TimeoutError):
        send_all(pair[0], b"x" * 10**7, time.monotonic_ns() + ahead_ns)
