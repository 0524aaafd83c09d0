"""A relay without the key, between a store's client and its server, changes nothing and reads no secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.conformance.altering_relay import Alter, AlteringRelay

from ronde.errors import PeerLostError
from ronde.net.addresses import parse_address
from ronde.settings import JobKey
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient

LONG = 30 * 10**9
KEY = JobKey.generate()


@pytest.fixture(params=[False, True], ids=["sealed", "secret"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with closing(StoreServer("tcp:127.0.0.1:0", KEY, is_secret=request.param)) as server:
        yield server


def relay_to(server: StoreServer, alter: Alter) -> AlteringRelay:
    address = parse_address(server.address)
    return AlteringRelay(lambda: (address.host, address.port), alter)


def flipped(message: bytes, place: int) -> bytes:
    altered = bytearray(message)
    altered[place] ^= 1
    return bytes(altered)


class Memory:
    """Alters the message number 1 of one direction, or of both, by what it has seen."""

    def __init__(self, act: str) -> None:
        self._act = act
        self._first = self._last_request = b""

    def __call__(self, to_server: bool, number: int, message: bytes) -> bytes:
        if to_server:
            self._last_request = message
        if to_server is not self._act.endswith("request"):
            return message
        if number == 0:
            self._first = message
        if number != 1:
            return message
        match self._act.split()[0]:
            case "flip-value":
                return flipped(message, -17)  # the last byte before the tag
            case "flip-head":
                return flipped(message, 4)  # the operation, or the status
            case "flip-tag":
                return flipped(message, -1)
            case "repeat":
                return message + message
            case "replay":
                return self._first
            case "reflect":
                return self._last_request
        raise AssertionError(self._act)


def set_until_lost(client: StoreClient) -> None:
    for _ in range(3):  # the first of two equal requests may get its answer
        client.set("other", b"what is asked for")


REQUESTS = [f"{act} request" for act in ("flip-value", "flip-head", "flip-tag", "repeat", "replay")]
ANSWERS = [f"{act} answer" for act in ("flip-value", "flip-head", "flip-tag", "replay", "reflect")]


@pytest.mark.parametrize("act", REQUESTS)
def test_an_altered_request_changes_nothing(server: StoreServer, act: str) -> None:
    with (
        closing(StoreClient(server.address, KEY, LONG)) as direct,
        closing(relay_to(server, Memory(act))) as relay,
    ):
        direct.set("key", b"10")
        with closing(StoreClient(relay.address, KEY, LONG, patience_ns=0)) as client:
            assert client.add("key", 1) == 11
            with pytest.raises(PeerLostError):
                set_until_lost(client)
        assert direct.get("key", 0) == b"11"
        if not act.startswith("repeat"):
            assert not direct.check(["other"])


@pytest.mark.parametrize("act", ANSWERS)
def test_an_altered_answer_is_not_believed(server: StoreServer, act: str) -> None:
    with (
        closing(StoreClient(server.address, KEY, LONG)) as direct,
        closing(relay_to(server, Memory(act))) as relay,
    ):
        direct.multi_set({"one": b"first value", "two": b"other value"})
        with closing(StoreClient(relay.address, KEY, LONG, patience_ns=0)) as client:
            assert client.get("one", 0) == b"first value"
            with pytest.raises(PeerLostError, match="altered, repeated or left out on the way"):
                client.get("two", 0)


def test_after_an_altered_answer_the_client_goes_on_and_says_so(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    remaining = [flipped]

    def alter(to_server: bool, number: int, message: bytes) -> bytes:
        return message if to_server or number == 0 or not remaining else remaining.pop()(message, 6)

    with (
        closing(relay_to(server, alter)) as relay,
        closing(StoreClient(relay.address, KEY, LONG)) as client,
        caplog.at_level(logging.WARNING),
    ):
        assert [client.add("n", 1) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert sum("altered" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("dropped", ["request", "answer"])
def test_what_is_dropped_on_the_way_happens_once(server: StoreServer, dropped: str) -> None:
    """Each message of the first three connections is the last one, and is lost."""
    connections: list[int] = []

    def drop(to_server: bool, number: int, message: bytes) -> bytes:
        if to_server is (dropped == "request") and number == 1 and len(connections) < 3:
            connections.append(number)
            raise ConnectionResetError
        return message

    with closing(relay_to(server, drop)) as relay, closing(StoreClient(relay.address, KEY, LONG)) as client:
        assert [client.add("n", 1) for _ in range(8)] == list(range(1, 9))
    assert len(connections) == 3


def test_what_was_recorded_on_one_connection_is_worth_nothing_on_the_next(server: StoreServer) -> None:
    recorded: list[bytes] = []

    def replay(to_server: bool, number: int, message: bytes) -> bytes:
        if not to_server or len(recorded) > 3:
            return message
        recorded.append(message)
        if len(recorded) == 2:
            raise ConnectionResetError  # the client comes back, and gets what it has said before
        return recorded[0] if len(recorded) == 3 else message

    with closing(relay_to(server, replay)) as relay, closing(StoreClient(relay.address, KEY, LONG)) as client:
        assert [client.add("n", 1) for _ in range(4)] == [1, 2, 3, 4]
    assert len(recorded) > 3


@pytest.mark.parametrize(("of_server", "of_client"), [(False, False), (True, False), (False, True)])
def test_what_is_secret_cannot_be_read_on_the_way(of_server: bool, of_client: bool) -> None:
    with (
        closing(StoreServer("tcp:127.0.0.1:0", KEY, is_secret=of_server)) as server,
        closing(relay_to(server, lambda _to_server, _number, message: message)) as relay,
    ):
        with closing(StoreClient(relay.address, KEY, LONG, is_secret=of_client)) as client:
            client.set("a-known-key", b"a known value" * 1000)
            assert client.get("a-known-key", 0) == b"a known value" * 1000
        for text in (b"a-known-key", b"a known value"):
            assert (text in relay.seen) is not (of_server or of_client)
