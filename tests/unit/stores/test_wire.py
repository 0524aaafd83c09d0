"""Lists in requests and answers, and bytes that are not a request."""

from __future__ import annotations

import random

import pytest
from tests.unit.stores.members import packed_keys

from ronde._native import new_connections, read_request
from ronde.errors import ProtocolError
from ronde.stores import wire
from ronde.stores.request_handler import RequestHandler
from ronde.stores.wire import HEAD, OPERATIONS, request

VALUES = [b"", b"v", b"v" * 32, b"v" * 33, b"v" * 5000]


def test_lists_come_back() -> None:
    keys = [b"a", b"b" * 1024, "鍵".encode()]
    assert wire.keys_from(packed_keys(keys)) == keys
    assert wire.values_from(wire.pack_values(VALUES)) == VALUES
    pairs = dict(zip([b"1", b"2", b"3", b"4", b"5", b"6"], [None, *VALUES]))
    assert wire.pairs_from(wire.pack_pairs(pairs)) == pairs
    assert wire.keys_from(b"") == []


def test_known_values_travel_as_something_shorter() -> None:
    pairs = {b"%d" % len(value): value for value in VALUES}
    packed = wire.pack_known({**pairs, b"absent": None})
    assert len(packed) < 300
    known = wire.known_from(packed)
    assert known.pop(b"absent") is None
    assert known == {key: wire.fingerprint(value) for key, value in pairs.items()}
    assert len(set(known.values())) == len(VALUES)


def test_an_expected_value_has_all_of_its_bytes() -> None:
    assert wire.split_expected(b"\0\0\0\2abc") == (b"ab", b"c")
    assert wire.split_expected(b"\0\0\0\3abc") == (b"abc", b"")
    with pytest.raises(ProtocolError, match="is incomplete"):
        wire.split_expected(b"\0\0\0\4abc")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nonsense_is_a_protocol_error(operation: int) -> None:
    chance = random.Random(operation)
    handler = RequestHandler()
    session = handler.open_session(b"i" * 16)
    session.connection = object()
    connections = new_connections()
    for _ in range(2000):
        body = chance.randbytes(chance.randrange(30))
        if chance.random() < 0.5:
            body = bytes(chance.choice([0, 0, 0, 1, 2, 255]) for _ in body)
        frame = bytearray(request(operation, b"k" * chance.randrange(3), body, chance.choice([0, 1, 10**9])))
        if chance.random() < 0.3:
            frame[chance.randrange(4, HEAD.size)] = chance.randrange(256)
        read = read_request(0, bytes(frame), connections)
        if read is None:
            continue
        try:
            answer = handler.answer_request(session, *read[1:])
        except (ProtocolError, ConnectionResetError):
            continue
        if answer is None:
            handler.expire_request(session)
    assert session.parked is None
