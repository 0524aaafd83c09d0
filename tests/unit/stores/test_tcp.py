"""The served store in particular: strangers, wrong keys, broken clients, a server that ends."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.stores.members import Member, packed_keys

from ronde.errors import AuthenticationError, PeerLostError, TimeoutError, UsageError
from ronde.net.addresses import parse_address, resolve
from ronde.net.authenticating_listener import MAX_STRANGERS
from ronde.net.authentication import is_torch_store
from ronde.net.descriptors import OwnSocket
from ronde.settings import JobKey
from ronde.stores.server import StoreServer
from ronde.stores.store import VALUE_LIMIT_BYTES
from ronde.stores.tcp import StoreClient
from ronde.stores.wire import StoreOperation, pack_known, pack_pairs, pairs_from, request

SECOND = 10**9
LONG = 30 * SECOND
KEY = JobKey.generate()


@pytest.fixture(params=["tcp:127.0.0.1:0", "unix:@ronde-test-server-{pid}"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    server = StoreServer(request.param.format(pid=os.getpid()), KEY)
    yield server
    server.close()


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    client = StoreClient(server.address, KEY, LONG, patience_ns=0)
    yield client
    client.close()


def stranger(server: StoreServer) -> socket.socket:
    endpoint = resolve(parse_address(server.address))[0]
    sock = socket.socket(endpoint.family)
    sock.settimeout(30)
    sock.connect(endpoint.sockaddr)
    return sock


def member(server: StoreServer) -> Member:
    return Member(stranger(server), KEY)


def is_hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_another_key_is_refused_at_once(server: StoreServer, client: StoreClient) -> None:
    with pytest.raises(AuthenticationError, match=f"the store at {server.address}: .*RONDE_JOB_KEY"):
        StoreClient(server.address, JobKey.generate(), LONG)
    client.set("still", b"here")


def test_a_client_that_asks_for_torchs_store_is_not_taken_for_torchrun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client does so whose greeting a stopped server has not answered; it reads both when it goes on."""
    server = StoreServer("tcp:127.0.0.1:0", KEY)
    try:
        endpoint = resolve(parse_address(server.address))[0]
        assert not is_torch_store(endpoint, 30)
        assert (server.last_refusal, caplog.messages) == ("", [])
        with stranger(server) as sock:
            sock.send(b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + b"1234")
            assert is_hung_up(sock)
        while not server.last_refusal:  # it hangs up before it notes why
            time.sleep(0.001)
        assert "probably a node started by torchrun" in server.last_refusal
    finally:
        server.close()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.0\r\n\r\n" * 9, b"\0" * 1000, os.urandom(1000)], ids=len)
def test_a_stranger_that_talks_is_turned_away(server: StoreServer, client: StoreClient, words: bytes) -> None:
    with stranger(server) as sock:
        sock.send(words)
        assert is_hung_up(sock)
    client.set("still", b"here")


def test_of_too_many_strangers_the_oldest_goes(server: StoreServer, client: StoreClient) -> None:
    strangers = [stranger(server) for _ in range(MAX_STRANGERS + 1)]
    assert is_hung_up(strangers[0])
    client.set("still", b"here")
    with member(server):
        pass
    for sock in strangers:
        sock.close()


@pytest.mark.parametrize(
    "words",
    [
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 0),
        struct.pack("!I", 20) + b"\xff" * 20,
        request(StoreOperation.SET, b"k" * 2000, b"v"),
        request(StoreOperation.ADD, b"k", b"many"),
        request(StoreOperation.ADD, b"k", b"9" * 5000),
        request(StoreOperation.GET, b""),
        request(99, b"k"),
        request(StoreOperation.SET, b"k", b"v" * (VALUE_LIMIT_BYTES + 1)),
        request(StoreOperation.WAIT, b"", b"\0\5k"),
        request(StoreOperation.MULTI_SET, b"", pack_pairs({b"k": b"value"})[:-1]),
        request(StoreOperation.SET, b"k", b"v") * 2,
        request(StoreOperation.COMPARE_SET, b"k", b"\0"),
        request(StoreOperation.COMPARE_SET, b"k", struct.pack("!I", 2) + b"1"),
        request(StoreOperation.GET, b"never", timeout_ns=LONG) * 2,
    ],
    ids=lambda words: words[4:12].hex(),
)
def test_a_member_that_talks_nonsense_is_dropped(
    server: StoreServer, client: StoreClient, words: bytes
) -> None:
    with member(server) as sock:
        sock.send(words)
        assert is_hung_up(sock.sock)
    client.set("still", b"here")


def test_a_member_may_write_in_any_pieces(server: StoreServer) -> None:
    with member(server) as sock:
        for byte in sock.sealed(request(StoreOperation.SET, b"key", b"value")):
            sock.sock.send(bytes([byte]))
        assert sock.receive(100) == b"\0"


def test_slow_strangers_keep_no_client_out(server: StoreServer, client: StoreClient) -> None:
    dawdlers = []
    for _ in range(3 * MAX_STRANGERS):
        dawdlers.append(stranger(server))
        dawdlers[-1].send(b"RNDE")
    with member(server) as sock:
        sock.send(request(StoreOperation.SET, b"key", b"value"))
        assert sock.receive(100) == b"\0"
    client.set("still", b"here")
    for dawdler in dawdlers:
        dawdler.close()


def test_a_member_that_takes_no_answers_costs_only_itself(server: StoreServer, client: StoreClient) -> None:
    client.set("key", b"v" * VALUE_LIMIT_BYTES)
    with member(server) as sock:
        sock.sock.setblocking(False)
        asked = request(StoreOperation.MULTI_GET, b"", packed_keys([b"key"] * 30))

        def ask() -> None:
            while True:
                client.set("still", b"here")
                with suppress(BlockingIOError):
                    sock.sock.send(sock.sealed(asked))

        with pytest.raises(ConnectionError):
            ask()
    client.set("still", b"here")


@pytest.mark.slow
def test_a_thousand_wait_for_one_key(server: StoreServer, client: StoreClient) -> None:
    waiting = [member(server) for _ in range(1000)]
    for sock in waiting[::2]:
        sock.send(request(StoreOperation.GET, b"key", timeout_ns=LONG))
    for sock in waiting[1::2]:
        sock.send(
            request(StoreOperation.WATCH, b"", pack_known({b"key": None, b"other": None}), timeout_ns=LONG)
        )
    client.queue_push("queue", b"")  # when this is answered, most of them are parked
    client.set("key", b"value")
    for sock in waiting[::2]:
        assert sock.receive(100) == b"\0value"
    for sock in waiting[1::2]:
        answer = sock.receive(100)
        assert pairs_from(answer[1:]) == {b"key": b"value"}
    assert client.get("key", 0) == b"value"
    for sock in waiting:
        sock.sock.close()


def test_a_waiter_that_died_is_forgotten(server: StoreServer, client: StoreClient) -> None:
    with member(server) as sock:
        sock.send(request(StoreOperation.GET, b"key", timeout_ns=LONG))
    client.set("key", b"value")
    assert client.get("key", 0) == b"value"


def test_a_slow_reader_gets_all(server: StoreServer, client: StoreClient) -> None:
    value = os.urandom(1 << 20)
    client.set("key", value)
    with member(server) as sock:
        sock.send(request(StoreOperation.GET, b"key"))
        client.set("other", b"meanwhile")
        assert sock.receive(1 << 21) == b"\0" + value


def test_a_client_may_come_before_its_server() -> None:
    address, seen = f"unix:@ronde-test-{os.getpid()}-late", []

    def come() -> None:
        client = StoreClient(address, KEY, LONG)
        seen.append(client.get("key", LONG))
        client.close()

    thread = threading.Thread(target=come)
    thread.start()
    time.sleep(0.02)
    server = StoreServer(address, KEY)
    client = StoreClient(address, KEY, LONG)
    client.set("key", b"value")
    thread.join()
    client.close()
    server.close()
    assert seen == [b"value"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("unix:@ronde-test-nobody", "Connection refused"),
        ("unix:/nowhere/ronde", "No such file"),
        ("tcp:127.0.0.1:1", "Connection refused"),
        ("tcp:no-such-host.invalid:1", ""),
    ],
)
def test_no_server_at_the_address(address: str, reason: str) -> None:
    with pytest.raises(TimeoutError, match=f"waited 0.05 s for the store at {address}: {reason}") as caught:
        StoreClient(address, KEY, SECOND // 20)
    assert caught.value.operation == "store"


def test_close_spares_a_file_with_the_number_of_the_connection(server: StoreServer) -> None:
    """The program has called os.closerange and then opened files."""
    client = StoreClient(server.address, KEY, LONG)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = client._fd
        os.dup2(ours.fileno(), number)  # closes the connection
        client.close()
        assert os.path.sameopenfile(number, ours.fileno())
        os.close(number)
        ours.shutdown(socket.SHUT_WR)
        assert theirs.recv(100) == b""


def test_a_client_that_was_not_closed_spares_a_file_with_the_number_of_its_connection(
    server: StoreServer, tmp_path: Path
) -> None:
    client = StoreClient(server.address, KEY, LONG)
    number = client._fd
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        os.dup2(file.fileno(), number)  # closes the connection
        del client
        gc.collect()
        assert os.path.sameopenfile(number, file.fileno())
        os.close(number)


@pytest.mark.parametrize("end", ["_stop", "_stop_writer"])
def test_closing_a_server_spares_a_file_with_the_number_of_its_pipe(tmp_path: Path, end: str) -> None:
    server = StoreServer("unix:@ronde-test-closed", KEY)
    number = getattr(server, end)
    kept = os.dup(number)
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        for stranger in (file.fileno(), eventfd):
            os.dup2(stranger, number)  # closes the pipe
            server.close()
            assert os.path.sameopenfile(number, stranger)
        assert os.fstat(file.fileno()).st_size == 0
    with pytest.raises(BlockingIOError):
        os.eventfd_read(eventfd)
    os.dup2(kept, number)  # so that the server can end
    os.close(kept)
    os.close(eventfd)
    server.close()
    server.wait()


def test_closing_a_server_spares_files_with_the_numbers_of_its_sockets(tmp_path: Path) -> None:
    server = StoreServer("tcp:127.0.0.1:0", KEY)
    client = StoreClient(server.address, KEY, LONG)
    numbers = [*server._clients, *(listener.fileno() for listener in server._listeners)]
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        for number in numbers:
            os.dup2(file.fileno(), number)  # closes the socket
        server.close()
        for number in numbers:
            assert os.path.sameopenfile(number, file.fileno())
            os.close(number)
    client.close()


def test_a_socket_of_a_connection_can_be_duplicated() -> None:
    with OwnSocket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, sock.dup() as other:
        assert other.is_own()
        assert other.fileno() != sock.fileno()


def test_a_forked_child_keeps_a_file_with_the_number_of_a_closed_servers_journal(tmp_path: Path) -> None:
    server = StoreServer("unix:@ronde-test-journal", KEY, tmp_path / "journal")
    assert server._journal is not None
    number = server._journal._fd
    server.close()
    with open(tmp_path / "file", "wb") as file:
        os.dup2(file.fileno(), number)
        program = f"import os; os.fstat({number})"
        subprocess.run(
            [sys.executable, "-c", program], pass_fds=[number], preexec_fn=lambda: None, check=True
        )
        os.close(number)


def test_a_closed_server_ends_no_client(server: StoreServer, client: StoreClient) -> None:
    errors = []

    def wait() -> None:
        try:
            client.get("never", LONG)
        except PeerLostError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    address = server.address
    server.close()
    thread.join()
    server.close()
    (message,) = errors
    assert message.startswith(f"lost the store at {address}: ")
    with pytest.raises(PeerLostError, match="lost the store at"):
        client.set("key", b"")
    again = StoreServer(address, KEY)
    assert again.address == address
    again.close()


def test_a_taken_address_is_refused(server: StoreServer) -> None:
    with pytest.raises(UsageError, match=f"cannot serve at {server.address}: Address already in use"):
        StoreServer(server.address, KEY)


def test_a_socket_in_the_file_system_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "store"
    server = StoreServer(f"unix:{path}", KEY)
    assert path.is_socket()
    server.close()
    assert not path.exists()


def test_adding_to_what_is_no_number(client: StoreClient) -> None:
    client.set("key", b"text")
    with pytest.raises(UsageError, match="cannot add to 'key': its value is not a number"):
        client.add("key", 1)
    assert client.get("key", 0) == b"text"


def test_one_call_carries_half_of_a_frame(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.stores.tcp.FRAME_LIMIT_BYTES", 2000)
    client.multi_set({"a": b"1" * 400, "b": b"2" * 500})
    with pytest.raises(UsageError, match="one call to a store has at most 1000 bytes of keys and values"):
        client.multi_set({"a": b"3" * 600, "b": b"4" * 500})
    assert client.get("a", LONG) == b"1" * 400


def test_timers_of_waiters_that_were_served_do_not_pile_up(server: StoreServer, client: StoreClient) -> None:
    other = StoreClient(server.address, KEY, LONG)
    for number in range(300):
        thread = threading.Thread(target=client.get, args=(f"{number}", LONG))
        thread.start()
        other.set(f"{number}", b"")
        thread.join()
    assert len(server._timers) < 150
    other.close()


ENDS_WHILE_THREADS_ASK = """
import threading, time
from ronde.stores.tcp import StoreClient
from ronde.stores.server import StoreServer
from ronde.settings import JobKey

key = JobKey.generate()
server = StoreServer("unix:@ends-while-threads-ask-%d" % threading.get_native_id(), key)

def ask():
    client = StoreClient(server.address, key, 10**10)
    while True:
        client.add("n", 1)

for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_process_may_end_while_its_threads_ask() -> None:
    for _ in range(4):
        subprocess.run([sys.executable, "-c", ENDS_WHILE_THREADS_ASK], check=True, timeout=60)


def test_the_loss_of_a_server_names_the_error_of_the_connection(
    server: StoreServer, client: StoreClient
) -> None:
    """A search for another store depends on whether this one has ended or is silent."""
    client.set("a", b"1")
    server.close()
    with pytest.raises(PeerLostError) as lost:
        client.get("a", LONG)
    assert isinstance(lost.value.__cause__, ConnectionError)
