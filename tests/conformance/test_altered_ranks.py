"""A relay without the key, between two ranks on different hosts, is noticed before what it altered is used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from tests.conformance.altering_relay import Alter, AlteringRelay

from ronde.comm.byte_exchange import broadcast_bytes
from ronde.comm.communicator import Communicator
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.comm.world_attempt import WorldAttempt
from ronde.errors import PeerLostError
from ronde.net.addresses import parse_address
from ronde.net.connections import Channel
from ronde.settings import JobKey, Settings
from ronde.stores.memory import MemoryStore

KEY = JobKey.generate()
ALTERED = "what it sent was altered, repeated or left out on the way"
FRAME_BYTES = 40 + 16
TEXT = b"a text that nobody else should read"
TENSOR = np.frombuffer(TEXT * 10, np.uint8)

Program = Callable[[Communicator], object]


def flip(place: int) -> Alter:
    """Return what changes a bit of the first piece that goes to rank 0."""

    def alter(to_server: bool, number: int, piece: bytes) -> bytes:
        if not to_server or number > 0:
            return piece
        altered = bytearray(piece)
        altered[place] ^= 1
        return bytes(altered)

    return alter


def repeat(to_server: bool, number: int, piece: bytes) -> bytes:
    return piece + piece if to_server and number == 0 else piece


def untouched(_to_server: bool, _number: int, piece: bytes) -> bytes:
    return piece


@contextmanager
def relayed(channel: Channel, alter: Alter) -> Iterator[tuple[AlteringRelay, list[tuple[str, int]]]]:
    """Yield a relay for the connections of this channel, and where to put the address that it shall call."""
    target: list[tuple[str, int]] = []
    relay = AlteringRelay(
        lambda: target[0],
        alter,
        concerns=lambda hello: int.from_bytes(hello[11:13], "big") == channel,  # in the label
        receive=lambda sock: sock.recv(1 << 16),
    )
    with closing(relay):
        yield relay, target


def run(
    program: Program, channel: Channel, alter: Alter, protection: str = "messages"
) -> tuple[list[object], bytes]:
    """Run the program on two ranks with a relay in between.

    Return what it returned or raised on each, and all that the relay has seen.
    """
    store, results = MemoryStore(), [None, None]  # type: tuple[MemoryStore, list[object]]
    settings = Settings(transport="tcp", tcp_streams=1, protection=protection, timeout_ns=60 * 10**9)

    def play(rank: int, relay: AlteringRelay, target: list[tuple[str, int]]) -> None:
        now_ns = time.monotonic_ns()
        through_store = WorldAttempt(store, rank, 2, now_ns, now_ns + 60 * 10**9).exchange

        def exchange(mine: bytes) -> list[bytes]:
            told = through_store(mine)
            if told[0].startswith(b"tcp:") and rank == 1:
                address = parse_address(told[0].decode())
                target.append((address.host, address.port))
                told[0] = relay.address.encode()
            return told

        try:
            deadline_ns = time.monotonic_ns() + 60 * 10**9
            comm = CommunicatorFactory(settings, KEY).make_world(rank, 2, exchange, "world", deadline_ns)
            try:
                results[rank] = program(comm)
            finally:
                comm.shutdown()
        except Exception as error:
            results[rank] = error

    with relayed(channel, alter) as (relay, target):
        threads = [threading.Thread(target=play, args=(rank, relay, target)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, relay.seen


def send_tensor(comm: Communicator) -> bytes:
    if comm.rank == 1:
        comm.send(TENSOR, 0)
        received = comm.recv(np.zeros_like(TENSOR), 0)  # so that nothing else is in the first piece
    else:
        received = comm.recv(np.zeros_like(TENSOR), 1)
        comm.send(received, 1)
    comm.barrier()
    return bytes(received)


def send_message(comm: Communicator) -> bytes:
    """Tell rank 0 something in the way that the engine does."""
    if comm.rank == 1:
        comm._send_sealed(TENSOR, 0)
        return TENSOR.tobytes()
    received = np.zeros_like(TENSOR)
    comm._recv_sealed(received, 1)
    return bytes(received)


def split_alike(comm: Communicator) -> int:
    """Let both ranks choose the same color, so that they are one group."""
    child = comm.split(77)
    assert child is not None
    return child.size


def recolor(to_server: bool, _number: int, piece: bytes) -> bytes:
    return piece.replace((77).to_bytes(8, "little"), (78).to_bytes(8, "little")) if to_server else piece


def leave_early(comm: Communicator) -> str:
    if comm.rank == 1:
        return "left"
    comm.barrier()
    return "met"


def assert_noticed(results: list[object]) -> None:
    assert isinstance(results[0], PeerLostError)
    assert ALTERED in str(results[0])
    assert results[0].rank == 1


@pytest.mark.parametrize(
    ("protection", "is_read"), [("messages", True), ("payload", True), ("secret", False)]
)
def test_through_a_relay_all_arrives_and_secrets_stay_secret(protection: str, is_read: bool) -> None:
    def program(comm: Communicator) -> tuple[bytes, bytes]:
        return send_tensor(comm), broadcast_bytes(comm, TEXT * 1000)

    results, seen = run(program, Channel.DATA, untouched, protection)
    assert results == [(TENSOR.tobytes(), TEXT * 1000)] * 2
    assert (TEXT in seen) is is_read


@pytest.mark.parametrize(
    "place", [0, *(pytest.param(place, marks=pytest.mark.slow) for place in (20, 39, FRAME_BYTES - 1))]
)
def test_an_altered_frame_is_noticed_always(place: int) -> None:
    assert_noticed(run(send_tensor, Channel.DATA, flip(place))[0])


@pytest.mark.parametrize("protection", ["payload", "secret"])
@pytest.mark.parametrize(
    "alter",
    [
        pytest.param(flip(FRAME_BYTES + 5), id="tensor"),
        pytest.param(flip(-1), id="tag", marks=pytest.mark.slow),
        pytest.param(repeat, id="repeated", marks=pytest.mark.slow),
    ],
)
def test_an_altered_tensor_is_noticed_by_the_setting(protection: str, alter: Alter) -> None:
    assert_noticed(run(send_tensor, Channel.DATA, alter, protection)[0])


def test_an_altered_message_of_the_engine_is_noticed_always() -> None:
    assert_noticed(run(send_message, Channel.DATA, flip(FRAME_BYTES + 5))[0])


def test_an_altered_color_of_a_split_is_noticed_always() -> None:
    assert_noticed(run(split_alike, Channel.DATA, recolor)[0])


@pytest.mark.parametrize(
    "alter", [pytest.param(flip(8), id="words"), pytest.param(flip(-1), id="tag", marks=pytest.mark.slow)]
)
def test_an_altered_goodbye_is_noticed(alter: Alter) -> None:
    assert_noticed(run(leave_early, Channel.CONTROL, alter)[0])


def test_the_relay_is_what_the_ranks_talk_through() -> None:
    results, seen = run(leave_early, Channel.CONTROL, untouched)
    assert isinstance(results[0], PeerLostError)
    assert "has shut down" in str(results[0])
    assert len(seen) > 512
