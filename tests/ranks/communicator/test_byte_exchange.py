"""Bytes of any length reach all ranks, whichever way they travel."""

from __future__ import annotations

import pytest

import ronde
from ronde.testing import ranks


def _exchange(length: int) -> None:
    from ronde.comm.byte_exchange import allgather_bytes, broadcast_bytes, exchange_among, gather_bytes

    ronde.init()
    comm = ronde.world()
    messages = [bytes([rank]) * (length * rank) for rank in range(comm.size)]
    mine = messages[comm.rank]
    assert allgather_bytes(comm, mine) == messages
    assert gather_bytes(comm, mine) == (messages if comm.rank == 0 else [])
    assert broadcast_bytes(comm, b"x" * length if comm.rank == 0 else mine) == b"x" * length
    reverse = range(comm.size)[::-1]
    assert exchange_among(comm, reverse)(mine) == messages[::-1]
    ronde.shutdown()


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [0, 1, 2039, 2040, 2041, 100_000])
def test_all_ranks_get_the_bytes_of_all(length: int, transport: str) -> None:
    ranks.run(_exchange, 3, length, environ={"RONDE_TRANSPORT": transport})


def test_messages_that_are_cut_off_are_refused() -> None:
    from ronde.comm.byte_exchange import framed, unframed

    whole = framed(b"abc")
    assert unframed(whole) == [b"abc"]
    for length in range(1, whole.size):
        with pytest.raises(ronde.ProtocolError, match="a message ends"):
            unframed(whole[:length])
