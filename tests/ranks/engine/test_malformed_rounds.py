"""A rank that says in a round of negotiation what no rank says: all ranks name it, whoever reads it."""

from __future__ import annotations

import pytest

from ronde.testing import ranks


def _all_reduce_after(rank: int, module: str, function: str, message: bytes) -> str:
    import importlib

    import numpy as np

    import ronde

    ronde.init()
    ronde.allreduce(np.ones(3), name="before")
    if ronde.rank() == rank:
        sent = np.frombuffer(message, np.uint8).copy() if function == "_first_part" else message
        setattr(importlib.import_module(module), function, lambda *_: sent)
    with pytest.raises(ronde.PeerLostError) as caught:
        ronde.allreduce(np.ones(3), name="after")
    assert caught.value.rank == rank
    return str(caught.value)


@pytest.mark.parametrize(
    ("rank", "place", "message", "text"),
    [
        (1, "engine.negotiator.encode_requests", b"[[7]]", "malformed message of the negotiation"),
        (0, "comm.byte_exchange._first_part", b"\xff" * 2048, "a message of 18446744073709551615 bytes"),
        (0, "engine.negotiator.encode_stream", b"[[7]]", "malformed message of the negotiation"),
        (0, "engine.negotiator.encode_stream", b'[["Evict",3]]', "slot 3 is evicted, but holds nothing"),
    ],
)
def test_who_sends_a_malformed_message_is_named(rank: int, place: str, message: bytes, text: str) -> None:
    module, _, function = place.rpartition(".")
    told = ranks.run(_all_reduce_after, 2, rank, f"ronde.{module}", function, message)
    for error in told:
        assert error.startswith(f"rank {rank} on "), error
        assert "sent an invalid message: " in error
        assert text in error
