"""What cannot be made lets go of what it was given."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from ronde import _native

KEYS = (bytes(32), bytes(32), False)
TOO_SHORT = (bytes(32), bytes(31), False)


@pytest.fixture
def given() -> Iterator[list[int]]:
    """Three sockets, whose other ends are open until the test is over."""
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        yield [one.detach() for one, _ in pairs]
    finally:
        for _, other in pairs:
            other.close()


def still_open(descriptors: list[int]) -> list[int]:
    return [fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}")]


def test_control_keys_of_the_wrong_length_leave_no_descriptor_open(given: list[int]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        _native.SharedConnections(
            {1: (given[0], *KEYS), 2: (given[1], *TOO_SHORT), 3: (given[2], *KEYS)},
        )
    assert still_open(given) == []


def test_data_keys_of_the_wrong_length_leave_no_descriptor_open(given: list[int]) -> None:
    segment = os.memfd_create("memory")
    watch = _native.JoinedWatch(_native.SharedConnections({}), "world", 0, ["a", "b"], [0, 1])
    with pytest.raises(ValueError, match="32 bytes"):
        _native.connect(
            rank=0,
            hosts=["a", "b"],
            host_of=[0, 1],
            cores=1,
            segment=segment,
            watch=watch,
            data={1: [(given[0], *TOO_SHORT), (given[1], *KEYS), (given[2], *KEYS)]},
            allreduce_algorithm=0,
            switch_over=[None, None, None],
            staging_bytes=1 << 20,
            timeout_ns=0,
            spin_us=0,
            adasum_hierarchical=False,
            hierarchical_allgather=False,
            seals_payload=False,
            twin=None,
        )
    watch.give_up()
    assert still_open([segment, *given]) == []
