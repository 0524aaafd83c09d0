"""Messages over an authenticated connection: whole, in order, unaltered, and of limited size."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.errors import ProtocolError
from ronde.net.authentication import ConnectionKeys
from ronde.net.message_channel import MESSAGE_LIMIT_BYTES, Frames, MessageChannel

ONE, OTHER = bytes(range(32)), bytes(range(32, 64))


def ends(conceals: bool = False) -> tuple[Frames, Frames]:
    return Frames(ConnectionKeys(ONE, OTHER, conceals)), Frames(ConnectionKeys(OTHER, ONE, conceals))


@pytest.mark.parametrize("conceals", [False, True], ids=["sealed", "encrypted"])
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(conceals: bool) -> None:
    sender, receiver = ends(conceals)
    sent = [b"", b"x", b"y" * 100_000, b"z"]
    stream = b"".join(map(sender.pack, sent))
    got: list[bytes] = []
    rng = random.Random(1)
    while stream:
        cut = rng.randrange(1, 70_000)
        got += receiver.feed(stream[:cut])
        stream = stream[cut:]
    assert got == sent


FIPS = """\
openssl_conf = openssl_init
[openssl_init]
providers = provider_sect
alg_section = algorithm_sect
[provider_sect]
base = base_sect
[base_sect]
activate = 1
[algorithm_sect]
default_properties = fips=yes
"""
WITHOUT_THE_CIPHER = """\
from ronde._native import SealedConnection, StoreLine
for make in (StoreLine()._use_keys, SealedConnection):
    try:
        make(bytes(32), bytes(32), False)
    except RuntimeError as error:
        print(error)
"""


def test_a_libcrypto_without_the_cipher_is_an_error_that_says_so(tmp_path: Path) -> None:
    """As in the FIPS mode of some distributions."""
    config = tmp_path / "openssl.cnf"
    config.write_text(FIPS)
    printed = subprocess.check_output(
        [sys.executable, "-c", WITHOUT_THE_CIPHER], env={**os.environ, "OPENSSL_CONF": str(config)}, text=True
    )
    assert printed.count("libcrypto offers no ChaCha20-Poly1305 here") == 2


def test_encrypted_messages_cannot_be_read() -> None:
    secret = b"a secret of 32 bytes or some more"
    assert secret in ends(conceals=False)[0].pack(secret)
    assert secret not in ends(conceals=True)[0].pack(secret)


def test_an_altered_repeated_omitted_or_foreign_message_is_an_error() -> None:
    first, second = (lambda sender: (sender.pack(b"first"), sender.pack(b"second")))(ends()[0])
    altered = bytearray(first)
    altered[6] ^= 1
    own = ends()[1].pack(b"first")  # reflected to its sender
    for stream in (bytes(altered), first + first, second, own):
        with pytest.raises(ProtocolError, match="altered, repeated or left out"):
            ends()[1].feed(stream)


def test_a_frame_over_the_limit_is_refused_before_its_bytes_are_kept() -> None:
    sender, receiver = ends()
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        sender.pack(bytes(MESSAGE_LIMIT_BYTES + 1))
    assert len(receiver.feed(sender.pack(bytes(MESSAGE_LIMIT_BYTES)))[0]) == MESSAGE_LIMIT_BYTES
    for length in (0, 15, MESSAGE_LIMIT_BYTES + 17, 2**32 - 1):
        with pytest.raises(ProtocolError, match="a frame has"):
            ends()[1].feed(length.to_bytes(4, "big"))


def test_a_hundred_thousand_random_frames_open_nothing() -> None:
    rng = random.Random(2)
    _, receiver = ends()
    for _ in range(100_000):
        body = rng.randbytes(rng.randrange(16, 48))
        with pytest.raises(ProtocolError):
            receiver.feed(len(body).to_bytes(4, "big") + body)
        receiver._inbox.clear()


def test_what_the_socket_does_not_take_waits() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender = MessageChannel(left, ConnectionKeys(ONE, OTHER, False))
        receiver = MessageChannel(right, ConnectionKeys(OTHER, ONE, False))
        sent = [bytes([number]) * 100_000 for number in range(20)]
        for message in sent:
            sender.send(message)
        assert sender.unsent
        got: list[bytes] = []
        while len(got) < len(sent):
            got += receiver.receive()
            sender.flush()
        assert got == sent
        assert receiver.receive() == []
        sender.close()
        with pytest.raises(ConnectionResetError):
            receiver.receive()
