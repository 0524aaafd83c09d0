"""Strangers at a served store: crowds, floods of words, and a listener that cannot accept any more."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.attacks.crowds import crowd

from ronde.job_key import JobKey
from ronde.net.addresses import listen, parse_address, resolve
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient

pytestmark = pytest.mark.alone

SECOND = 10**9
LONG = 60 * SECOND
KEY = JobKey.generate()


@pytest.fixture(params=["tcp:127.0.0.1:0", "unix:@ronde-test-attacked"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    server = StoreServer(request.param, KEY)
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("words", [b"", b"RNDE"], ids=["silent", "talking"])
def test_ten_thousand_connections_cost_nobody_anything(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is not delayed, one that reconnects is not lost, and a newcomer gets in soon."""
    monkeypatch.setattr("ronde.stores.tcp.shortcuts", lambda *_: ())  # all take the way of the strangers
    server = StoreServer("tcp:127.0.0.1:0", KEY)
    member = StoreClient(server.address, KEY, LONG, patience_ns=0)
    unlucky = StoreClient(server.address, KEY, LONG)
    longest_s = 0.0
    try:
        with crowd(server.address, 10_000, words=words):
            assert unlucky._sock is not None
            unlucky._sock.shutdown(socket.SHUT_RDWR)
            unlucky.set("reconnected", b"")
            for number in range(3):
                newcomer = StoreClient(server.address, KEY, LONG // 2)
                newcomer.set(f"newcomer {number}", b"")
                newcomer.close()
            for number in range(1000):
                began = time.monotonic()
                assert member.add("calls", 1) == number + 1
                longest_s = max(longest_s, time.monotonic() - began)
        assert longest_s < 5  # half of what would make it take the store for lost
    finally:
        member.close()
        unlucky.close()
        server.close()


def test_a_flood_of_strangers_makes_few_log_lines(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = resolve(parse_address(server.address))[0]
    with caplog.at_level(logging.WARNING, "ronde"):
        for number in range(2000):
            with socket.socket(endpoint.family) as sock:
                sock.connect(endpoint.sockaddr)
                sock.send(b"%d bottles of beer on the wall" % number)
        client = StoreClient(server.address, KEY, LONG)
        client.close()
        server.close()
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 4
    who = "127.0.0.1:" if endpoint.family == socket.AF_INET else "process "
    start = f"the store at {server.address} turned away "
    assert lines[0].startswith(f"{start}a connection from {who}")
    assert lines[0].endswith(": the other end does not speak Ronde's protocol")
    assert lines[-1].startswith(start)
    assert "more connections, the last from" in lines[-1]


def test_a_listener_that_cannot_accept_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Every `accept` fails there, as where a sandbox forbids it; the store does not spin, serves others, and ends."""
    listener, address = listen(parse_address("tcp:127.0.0.1:0"))
    broken = listener.dup()
    server = StoreServer(str(address), KEY, listener=listener)
    client = StoreClient(server.address, KEY, LONG)
    with caplog.at_level(logging.WARNING, "ronde"):
        broken.shutdown(socket.SHUT_RDWR)
        broken.close()
        began_s = time.process_time()
        time.sleep(1)
        spent_s = time.process_time() - began_s
        client.set("still", b"here")
        newcomer = StoreClient(server.address, KEY, LONG)  # by the short way
        newcomer.close()
        client.close()
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(30)
    assert not closing.is_alive()
    assert spent_s < 0.5
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"the store at {address} cannot accept connections and tries again: Invalid argument"


FEW_DESCRIPTORS = """
import resource, sys
from ronde.job_key import JobKey
from ronde.stores.server import StoreServer

server = StoreServer("tcp:127.0.0.1:0", JobKey.from_hex(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
print(server.address, flush=True)
sys.stdin.read()
server.close()
"""


def test_strangers_do_not_take_the_last_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may have far fewer than there are strangers, and lets clients in all the same, and ends."""
    monkeypatch.setattr("ronde.stores.tcp.shortcuts", lambda *_: ())
    words = [sys.executable, "-c", FEW_DESCRIPTORS, "11" * 32]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with crowd(address, 200):
            for number in range(3):
                client = StoreClient(address, JobKey.from_hex("11" * 32), LONG)
                assert client.add("calls", 1) == number + 1
                client.close()
    finally:
        process.communicate(timeout=60)
    assert process.returncode == 0
