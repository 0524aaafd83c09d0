"""Others who have taken the name or the port of a store: clients find the store all the same, or say who is there."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.other_user import NOBODY, start_as_nobody

from ronde.errors import AuthenticationError, ProtocolError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import listen, parse_address, resolve
from ronde.stores.server import StoreServer, shortcuts
from ronde.stores.tcp import StoreClient

pytestmark = pytest.mark.alone

SECOND = 10**9
LONG = 60 * SECOND
KEY = JobKey.generate()


TORCHS_STORE = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.argv[1] == "1")
print(store.port, flush=True)
sys.stdin.read()
"""


def say_nothing(_: socket.socket) -> None:
    pass


def say_garbage(sock: socket.socket) -> None:
    sock.send(b"SSH-2.0-OpenSSH_9.2p1\r\n")


def hang_up(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def service(listener: socket.socket, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Have everybody who calls answered like that, and kept."""
    kept: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                kept.append(sock)
                with suppress(OSError):
                    answer(sock)

    listener.setblocking(True)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for sock in (listener, *kept):
            sock.close()


def squat(path: str) -> None:
    listener, _ = listen(parse_address(f"unix:{path}"))
    with listener:
        print("listening", flush=True)
        sys.stdin.readline()


@contextmanager
def squatter_of_another_user(path: str) -> Iterator[None]:
    """Have a process of another user listen at an abstract name."""
    with start_as_nobody(squat, path) as squatter:
        assert squatter.stdout
        assert squatter.stdout.readline() == "listening\n"
        try:
            yield
        finally:
            squatter.communicate("\n", timeout=30)


@pytest.fixture
def short_name() -> Iterator[tuple[str, socket.socket]]:
    """The address of a store that is still to come, and the listener of a squatter on its short way's name."""
    probe, address = listen(parse_address("tcp:127.0.0.1:0"))
    probe.close()
    name = str(next(iter(shortcuts(resolve(address)[0], KEY))).sockaddr)
    squatter, _ = listen(parse_address(f"unix:@{name[1:]}"))
    yield str(address), squatter
    squatter.close()


@pytest.mark.parametrize("answer", [pytest.param(say_nothing, marks=pytest.mark.slow), say_garbage, hang_up])
def test_a_squatter_on_the_short_way_locks_nobody_out(
    short_name: tuple[str, socket.socket], answer: Callable[[socket.socket], None]
) -> None:
    address, squatter = short_name
    with service(squatter, answer):
        server = StoreServer(address, KEY)
        try:
            began = time.monotonic()
            client = StoreClient(address, KEY, LONG)
            client.set("key", b"value")
            assert time.monotonic() - began < 8
            assert client._sock is not None
            client._sock.shutdown(socket.SHUT_RDWR)
            assert client.get("key", LONG) == b"value"
            client.close()
        finally:
            server.close()


@pytest.mark.root
def test_another_users_squatter_is_named() -> None:
    address = "unix:@ronde-test-squatted"
    with squatter_of_another_user("@ronde-test-squatted"):
        with pytest.raises(UsageError, match=rf"cannot serve at {address}: .*process \d+ of user {NOBODY}"):
            StoreServer(address, KEY)
        with pytest.raises(AuthenticationError, match=rf"store at {address}: .*process \d+ of user {NOBODY}"):
            StoreClient(address, KEY, LONG)


def test_a_server_that_speaks_first_is_known_at_once() -> None:
    listener, address = listen(parse_address("tcp:127.0.0.1:0"))
    with service(listener, say_garbage), pytest.raises(ProtocolError, match="an incompatible server answers"):
        StoreClient(str(address), KEY, LONG)


@pytest.mark.slow
def test_a_mute_server_is_mentioned_within_seconds(caplog: pytest.LogCaptureFixture) -> None:
    listener, address = listen(parse_address("tcp:127.0.0.1:0"))
    with service(listener, say_nothing), pytest.raises(TimeoutError, match="has not answered the greeting"):
        StoreClient(str(address), KEY, 4 * SECOND)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [
        line for line in lines if line.startswith(f"waiting for the store at {address}: it has not answered")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("uses_libuv", [True, False], ids=["libuv", "threads"])
def test_torchs_store_is_recognized_within_seconds(uses_libuv: bool) -> None:
    """It says nothing at all if it runs on libuv; the other kind hangs up."""
    pytest.importorskip("torch")
    process = subprocess.Popen(
        [sys.executable, "-c", TORCHS_STORE, str(int(uses_libuv))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = f"tcp:127.0.0.1:{process.stdout.readline().strip()}"
        began = time.monotonic()
        with pytest.raises(ProtocolError, match=f"{address}: an incompatible server .*torchrun"):
            StoreClient(address, KEY, LONG)
        assert time.monotonic() - began < 30
    finally:
        process.communicate()  # it ends with its standard input


def test_a_client_of_torchs_is_recognized(caplog: pytest.LogCaptureFixture) -> None:
    server = StoreServer("tcp:127.0.0.1:0", KEY)
    target = parse_address(server.address)
    with caplog.at_level(logging.WARNING, "ronde"):
        with socket.create_connection((target.host, target.port)) as sock:
            sock.send(b"\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04")  # its greeting, and a ping
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        server.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert re.search(r"turned away a connection from 127.0.0.1:\d+: .*TCPStore, probably .* torchrun", line)
