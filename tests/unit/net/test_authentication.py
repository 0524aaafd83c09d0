from __future__ import annotations

import builtins
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest

from ronde.errors import AuthenticationError, VersionError
from ronde.net import authentication
from ronde.net.authentication import (
    LABEL_BYTES,
    ConnectionKeys,
    Handshake,
    Protection,
    Role,
    authenticate,
    receive_some,
    send_all,
)
from ronde.settings import JobKey

KEY = JobKey.generate()
HELLO_BYTES, PROOF_BYTES = 4 + 2 + 1 + LABEL_BYTES + 31, 32
KERNEL, SEALED, SECRET = Protection


def soon() -> int:
    return time.monotonic_ns() + 30 * 10**9


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def both(client: Handshake, server: Handshake) -> None:
    """Let the two talk to each other until one is done or raises."""
    sent = {client: client.greeting(), server: server.greeting()}
    while client.wanted or server.wanted:
        for one, other in ((server, client), (client, server)):
            if one.wanted and len(sent[other]) >= one.wanted:
                data, sent[other] = sent[other][: one.wanted], sent[other][one.wanted :]
                sent[one] += one.advance(data)
    assert sent == {client: b"", server: b""}


def test_both_ends_learn_the_others_label() -> None:
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SEALED, b"rank 3"),
        Handshake(Role.SERVER, KEY, "store", SEALED, b"rank 0"),
    )
    both(client, server)
    assert client.peer_label == b"rank 0".ljust(LABEL_BYTES, b"\0")
    assert server.peer_label == b"rank 3".ljust(LABEL_BYTES, b"\0")


def test_over_a_socket_nothing_beyond_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    def client() -> None:
        authenticate(pair[0], Role.CLIENT, KEY, "store", SEALED, soon(), b"me")
        pair[0].send(b"payload")

    thread = threading.Thread(target=client)
    thread.start()
    assert authenticate(pair[1], Role.SERVER, KEY, "store", SEALED, soon()).peer_label.startswith(b"me\0")
    thread.join()
    assert pair[1].recv(100) == b"payload"


@pytest.mark.parametrize(
    ("key", "purpose"), [(JobKey.generate(), "store"), (KEY, "world/1"), (KEY, ""), (KEY, "stor")]
)
def test_another_key_or_purpose_is_refused(key: JobKey, purpose: str) -> None:
    with pytest.raises(AuthenticationError, match="does not know the job key"):
        both(Handshake(Role.CLIENT, KEY, "store", SEALED), Handshake(Role.SERVER, key, purpose, SEALED))


def test_a_server_finds_out_a_client_that_cannot_prove() -> None:
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SEALED),
        Handshake(Role.SERVER, KEY, "store", SEALED),
    )
    server.advance(client.greeting())
    with pytest.raises(AuthenticationError):
        server.advance(bytes(PROOF_BYTES))


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    """A client without the key answers with the server's own proof."""
    server = Handshake(Role.SERVER, KEY, "store", SEALED)
    answer = server.advance(Handshake(Role.CLIENT, JobKey.generate(), "store", SEALED).greeting())
    with pytest.raises(AuthenticationError):
        server.advance(answer[HELLO_BYTES:])


def test_a_recorded_handshake_is_worthless() -> None:
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SEALED),
        Handshake(Role.SERVER, KEY, "store", SEALED),
    )
    hello = client.greeting()
    answer = server.advance(hello)
    client.advance(answer[:HELLO_BYTES])
    proof = client.advance(answer[HELLO_BYTES:])
    server.advance(proof)
    again = Handshake(Role.SERVER, KEY, "store", SEALED)
    again.advance(hello)
    with pytest.raises(AuthenticationError):
        again.advance(proof)


def test_a_changed_label_is_noticed() -> None:
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SEALED, b"rank 3"),
        Handshake(Role.SERVER, KEY, "store", SEALED),
    )
    answer = server.advance(client.greeting().replace(b"rank 3", b"rank 4"))
    client.advance(answer[:HELLO_BYTES])
    with pytest.raises(AuthenticationError):
        client.advance(answer[HELLO_BYTES:])


def test_a_server_says_nothing_to_a_stranger() -> None:
    server = Handshake(Role.SERVER, KEY, "store", SEALED)
    assert server.greeting() == b""
    assert server.wanted == HELLO_BYTES
    with pytest.raises(AuthenticationError, match="does not speak Ronde's protocol"):
        server.advance(b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES, b"\n"))


def test_both_ends_tell_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "PROTOCOL_VERSION", 7)
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SEALED),
        Handshake(Role.SERVER, KEY, "store", SEALED),
    )
    monkeypatch.undo()
    ours = authentication.PROTOCOL_VERSION
    with pytest.raises(
        VersionError, match=f"speaks version 7 of Ronde's protocol, this one {ours}; install the same"
    ):
        both(client, Handshake(Role.SERVER, KEY, "store", SEALED))
    with pytest.raises(VersionError, match="speaks version 7"):
        both(Handshake(Role.CLIENT, KEY, "store", SEALED), server)


def test_a_silent_peer_blocks_no_other(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(builtins.TimeoutError):
        authenticate(pair[0], Role.SERVER, KEY, "store", SEALED, time.monotonic_ns() + 10**7)


def test_a_peer_that_hangs_up(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(ConnectionError):
        authenticate(pair[0], Role.SERVER, KEY, "store", SEALED, soon())


def keys_of(client: Protection, server: Protection) -> tuple[ConnectionKeys, ConnectionKeys]:
    ends = Handshake(Role.CLIENT, KEY, "store", client), Handshake(Role.SERVER, KEY, "store", server)
    both(*ends)
    assert ends[0].keys
    assert ends[1].keys
    return ends[0].keys, ends[1].keys


def hkdf(key: bytes, salt: bytes, info: bytes, count: int) -> bytes:
    """HKDF-SHA256 as RFC 5869 writes it, independent of Ronde's."""
    extracted = hmac.digest(salt, key, "sha256")
    block = output = b""
    while len(output) < count:
        block = hmac.digest(extracted, block + info + bytes([len(output) // 32 + 1]), "sha256")
        output += block
    return output[:count]


def test_the_keys_of_a_connection_are_those_of_rfc_5869(monkeypatch: pytest.MonkeyPatch) -> None:
    case_1 = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42).hex()
    assert case_1.startswith("3cb25f25faacd57a90434f64d0362f2a")
    assert case_1.endswith("34007208d5b887185865")
    monkeypatch.setattr(os, "urandom", bytes)
    key = JobKey(bytes(range(32)))
    client, server = (
        Handshake(Role.CLIENT, key, "store", SECRET),
        Handshake(Role.SERVER, key, "store", SEALED),
    )
    hellos = [
        struct.pack("!4sHB16s31s", b"RNDE", authentication.PROTOCOL_VERSION, each, b"", b"")
        for each in (SECRET, SEALED)
    ]
    both(client, server)
    parts = [b"keys of a connection", b"store", *hellos]
    material = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    assert client.keys is not None
    assert client.keys.outgoing == hkdf(material, bytes(range(32)), b"client to server", 32)
    assert client.keys.incoming == hkdf(material, bytes(range(32)), b"server to client", 32)


def test_each_connection_has_keys_of_its_own_for_each_direction() -> None:
    client, server = keys_of(SEALED, SEALED)
    other, _ = keys_of(SEALED, SEALED)
    assert (client.outgoing, client.incoming) == (server.incoming, server.outgoing)
    assert len({client.outgoing, client.incoming, other.outgoing, other.incoming}) == 4
    assert client.outgoing.hex() not in repr(client)
    assert not client.conceals


@pytest.mark.parametrize(("client", "server"), [(SECRET, SECRET), (SECRET, SEALED), (SEALED, SECRET)])
def test_a_connection_is_secret_if_either_end_asks_for_it(client: Protection, server: Protection) -> None:
    assert all(keys.conceals for keys in keys_of(client, server))


def test_a_relay_cannot_weaken_the_protection() -> None:
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SECRET),
        Handshake(Role.SERVER, KEY, "store", SEALED),
    )
    hello = bytearray(client.greeting())
    hello[6] = SEALED
    answer = server.advance(bytes(hello))
    client.advance(answer[:HELLO_BYTES])
    with pytest.raises(AuthenticationError):
        client.advance(answer[HELLO_BYTES:])


def test_a_protection_that_is_unknown_is_named() -> None:
    """As a later version may have one: the weaker of the two must not pass for it."""
    with pytest.raises(
        VersionError, match=r"asks for protection 3, and this one knows 0 \(kernel\), 1 \(sealed\)"
    ):
        keys_of(SEALED, cast(Protection, 3))


def test_a_unix_socket_at_one_end_only_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="another process relays it"):
        keys_of(KERNEL, SEALED)
    client, server = (
        Handshake(Role.CLIENT, KEY, "store", SEALED),
        Handshake(Role.SERVER, KEY, "store", KERNEL),
    )
    with pytest.raises(AuthenticationError, match="another process relays it"):
        both(client, server)
    assert client.keys is None  # the end of the other kind refuses too, and first
    ends = Handshake(Role.CLIENT, KEY, "store", KERNEL), Handshake(Role.SERVER, KEY, "store", KERNEL)
    both(*ends)
    assert ends[0].keys is ends[1].keys is None


# Sending and receiving until a deadline.


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
