"""The store in etcd in particular: dead members, lost answers and leases, and errors about an unusable etcd."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.etcd_cluster import EtcdCluster
from tests.conformance.linearizability import Event, Recorder, check, history, random_calls
from tests.ports import free_ports

from ronde.errors import PeerLostError, TimeoutError, UsageError
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.rendezvous.store_access import open_etcd_store
from ronde.stores.etcd import EtcdStore

SECOND = 10**9
LONG = 60 * SECOND


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
def connect(etcd: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., EtcdStore]]:
    opened: list[EtcdStore] = []

    def connect(endpoints: object = None, **options: Any) -> EtcdStore:
        where = etcd.endpoints if endpoints is None else endpoints
        opened.append(EtcdStore(where, request.node.name, LONG, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield connect
    for store in opened:
        store.close()


class Relay:
    """Passes connections on to an etcd; `cut()` lets the next request through, and not its answer."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._cut = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        hang_up(self._listener)
        self._threads[0].join()
        for sock in self._connections:
            hang_up(sock)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._connections):
            sock.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._connections += [client, server]
            self._start(self._pass_on, client, server, False)
            self._start(self._pass_on, server, client, True)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                if is_answer and self._cut.is_set():
                    self._cut.clear()
                    break
                target.sendall(part)
        hang_up(source)
        hang_up(target)


def hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # done already
        sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(etcd: EtcdCluster) -> Iterator[Relay]:
    relay = Relay(etcd.endpoints[0])
    yield relay
    relay.close()


@pytest.mark.parametrize(
    ("call", "answer", "after"),
    [
        (lambda store: store.set("n", b"7"), None, b"7"),
        (lambda store: store.add("n", 3), 4, b"4"),
        (lambda store: store.append("n", b"0"), None, b"10"),
        (lambda store: store.compare_set("n", b"1", b"2"), b"2", b"2"),
        (lambda store: store.multi_set({"n": b"3", "m": b"4"}), None, b"3"),
        (lambda store: store.delete_key("n"), True, None),
        (lambda store: store.delete_prefix("n"), 1, None),
        (lambda store: store.hold("n", b"5"), None, b"5"),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set", "delete_key", "delete_prefix", "hold"],
)
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_change_whose_answer_is_lost_happens_once(
    relay: Relay,
    connect: Callable[..., EtcdStore],
    call: Callable[[EtcdStore], object],
    answer: object,
    after: bytes | None,
    skipped: int,
) -> None:
    direct, store = connect(), connect(relay.endpoint)
    direct.set("n", b"1")
    for _ in range(skipped):
        store.set("other", b"")  # so the client already has a counter
    relay.cut()
    assert call(store) == answer
    assert direct.watch({"n": b""}, LONG) == {"n": after}


def test_a_push_and_a_pop_whose_answers_are_lost_happen_once(
    relay: Relay, connect: Callable[..., EtcdStore]
) -> None:
    direct, store = connect(), connect(relay.endpoint)
    for number in range(4):
        relay.cut()
        store.queue_push("q", b"%d" % number)
    assert direct.queue_len("q") == 4
    popped = []
    for _ in range(4):
        relay.cut()
        popped.append(store.queue_pop("q", 0))
    assert popped == [b"0", b"1", b"2", b"3"]
    assert direct.queue_len("q") == 0


def test_a_watch_goes_on_when_its_connection_breaks(relay: Relay, connect: Callable[..., EtcdStore]) -> None:
    direct, store = connect(), connect(relay.endpoint)
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(store.watch({"key": None}, LONG)))
    thread.start()
    time.sleep(0.1)
    relay.cut()
    direct.set("other", b"")
    time.sleep(0.1)
    direct.set("key", b"1")
    thread.join()
    assert answers == [{"key": b"1"}]


def ask(endpoint: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(request).encode()
    with urllib.request.urlopen(f"http://{endpoint}/v3/{path}", body) as response:
        return dict(json.load(response))


def test_what_was_held_is_held_again_when_the_lease_was_lost(
    etcd: EtcdCluster, connect: Callable[..., EtcdStore]
) -> None:
    before = {lease["ID"] for lease in ask(etcd.endpoints[0], "kv/lease/leases", {}).get("leases", [])}
    holder, other = connect(lease_ns=2 * SECOND), connect()
    holder.hold("a", b"1")
    holder.hold("b", b"2")
    holder.hold("c", b"3")
    holder.delete_key("c")
    leases = {lease["ID"] for lease in ask(etcd.endpoints[0], "kv/lease/leases", {})["leases"]} - before
    ask(etcd.endpoints[0], "kv/lease/revoke", {"ID": leases.pop()})
    known: dict[str, bytes | None] = {"a": None, "b": None}
    while known != {"a": b"1", "b": b"2"}:
        known |= other.watch(known, LONG)
    assert not other.check(["c"])
    holder.close()
    assert other.num_keys() == 0


def test_a_lease_that_has_run_out_is_noticed_by_the_next_hold(
    etcd: EtcdCluster, connect: Callable[..., EtcdStore]
) -> None:
    before = {lease["ID"] for lease in ask(etcd.endpoints[0], "kv/lease/leases", {}).get("leases", [])}
    holder, other = connect(lease_ns=60 * SECOND), connect()
    holder.hold("a", b"1")
    leases = {lease["ID"] for lease in ask(etcd.endpoints[0], "kv/lease/leases", {})["leases"]} - before
    ask(etcd.endpoints[0], "kv/lease/revoke", {"ID": leases.pop()})
    assert not other.check(["a"])
    holder.hold("b", b"2")
    assert other.multi_get(["a", "b"], 0) == [b"1", b"2"]
    holder.close()
    assert other.num_keys() == 0


def test_a_forked_child_is_a_client_of_its_own(etcd: EtcdCluster) -> None:
    program = """if True:
        import os, sys
        from ronde.stores.etcd import EtcdStore
        store = EtcdStore(sys.argv[1], "fork", 60 * 10**9)
        store.hold("held", b"")
        store.set("a", b"parent")
        if os.fork() == 0:
            assert store.get("a", 0) == b"parent"
            store.set("a", b"child")
            store.hold("of the child", b"")
            store.close()
            os._exit(0)
        assert os.wait()[1] == 0
        assert store.get("a", 0) == b"child"
        store.set("a", b"parent again")
        assert store.check(["held"])
        assert not store.check(["of the child"])
        store.close()
    """
    command = ["python3", "-c", program, etcd.endpoints[0]]
    subprocess.run(
        command, check=True, env={**os.environ, "PYTHONPATH": "src"}, cwd=Path(__file__).parents[2]
    )


def test_more_keys_at_one_moment_than_etcd_takes(connect: Callable[..., EtcdStore]) -> None:
    store = connect()
    store.multi_set({f"key {number}": b"%d" % number for number in range(127)})
    store.multi_set({f"key {number}": b"%d" % number for number in range(127, 254)})
    with pytest.raises(UsageError, match="etcd sets at most 127 keys at one moment, not 128"):
        store.multi_set({f"key {number}": b"" for number in range(128)})
    keys = [f"key {number}" for number in range(254)]
    assert store.multi_get(keys, 0) == [b"%d" % number for number in range(254)]
    assert store.check(keys)
    with pytest.raises(UsageError, match=r"etcd at .* refused this: .*(too large|larger than max)"):
        store.multi_set({f"key {number}": bytes(1 << 20) for number in range(2)})
    store.set("key 1", b"still here")


def test_etcd_is_reached_by_ipv6(connect: Callable[..., EtcdStore]) -> None:
    with EtcdCluster(host="::1") as six:
        store = EtcdStore([f"http://{six.endpoints[0]}"], "six", LONG)
        other = store.fork()
        timer = threading.Timer(0.05, lambda: other.set("key", b"1"))
        timer.start()
        assert store.watch({"key": None}, LONG) == {"key": b"1"}
        timer.join()
        store.close()
        other.close()


def test_no_etcd_at_the_endpoint() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    with pytest.raises(
        TimeoutError, match=rf"waited 0.2 s for the store at etcd:127.0.0.1:{port}: .*refused"
    ):
        EtcdStore(f"127.0.0.1:{port}", "job", SECOND // 5)


def test_another_service_at_the_endpoint(etcd: EtcdCluster) -> None:
    with pytest.raises(UsageError, match="not an etcd with the JSON gateway of version 3"):
        EtcdStore(f"127.0.0.1:{etcd.peer_port}", "job", LONG)


@pytest.mark.parametrize(
    ("endpoints", "message"),
    [
        ("", "write host:port"),
        ("ftp://host:1", "write host:port"),
        ("host:port", "write host:port"),
        ("host:1,", "write host:port"),
        ("user:word@host:1", "write host:port"),
        ("host:1/path", "write host:port"),
        ("::1:2379", "write host:port"),
        ("http://a:1,https://b:1", "must all be http or all https"),
    ],
)
def test_endpoints_that_make_no_sense(endpoints: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EtcdStore(endpoints, "job", 0)


def test_one_that_dies_and_comes_back(connect: Callable[..., EtcdStore]) -> None:
    with EtcdCluster() as mortal:
        store = EtcdStore(mortal.endpoints, "job", LONG)
        impatient = EtcdStore(mortal.endpoints, "job", LONG, patience_ns=SECOND // 5)
        store.set("a", b"1")
        impatient.get("a", 0)
        answers: list[object] = []
        watcher = store.fork()
        threads = [
            threading.Thread(target=lambda: answers.append(watcher.watch({"b": None}, LONG))),
            threading.Thread(target=lambda: answers.append(store.add("n", 1))),
        ]
        threads[0].start()
        mortal.kill(0)
        with pytest.raises(PeerLostError, match="lost the store at etcd:127"):
            impatient.set("a", b"2")
        threads[1].start()
        mortal.start(0)
        threads[1].join()
        store.set("b", b"2")
        threads[0].join()
        assert answers == [1, {"b": b"2"}]
        assert impatient.get("a", LONG) == b"1"
        for client in (store, impatient, watcher):
            client.close()


def test_a_full_etcd_says_so() -> None:
    with EtcdCluster(extra=("--quota-backend-bytes=200000",)) as small:
        store = EtcdStore(small.endpoints, "job", LONG)

        def fill() -> None:
            # etcd compares its quota with the file it writes ten times a second: a fast disk takes many before.
            for number in range(10_000):
                store.set(f"key {number}", bytes(50_000))

        with pytest.raises(PeerLostError, match=r"etcd is full: .*compact and defragment it"):
            fill()
        assert store.get("key 0", 0) == bytes(50_000)
        store.close()


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the program `openssl`")
    files = {
        name: str(tmp_path / name) for name in ("ca.pem", "ca.key", "one.pem", "one.key", "one.csr", "san")
    }
    authority = "keyUsage=critical,keyCertSign,cRLSign"  # Python 3.13 and later trust no other
    Path(files["san"]).write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    new = [
        "openssl",
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=x",
    ]
    sign = ["openssl", "x509", "-req", "-days", "2", "-CA", files["ca.pem"], "-CAkey", files["ca.key"]]
    for command in (
        [
            *new,
            "-x509",
            "-days",
            "2",
            "-addext",
            authority,
            "-keyout",
            files["ca.key"],
            "-out",
            files["ca.pem"],
        ],
        [*new, "-keyout", files["one.key"], "-out", files["one.csr"]],
        [
            *sign,
            "-CAcreateserial",
            "-in",
            files["one.csr"],
            "-out",
            files["one.pem"],
            "-extfile",
            files["san"],
        ],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return files


def test_by_tls_with_certificates_on_both_sides(certificates: dict[str, str]) -> None:
    ca, certificate, key = (certificates[name] for name in ("ca.pem", "one.pem", "one.key"))
    extra = (
        f"--cert-file={certificate}",
        f"--key-file={key}",
        f"--trusted-ca-file={ca}",
        "--client-cert-auth",
    )
    with EtcdCluster(extra=extra) as etcd:
        store = EtcdStore(etcd.endpoints, "job", LONG, ca_file=ca, certificate_file=certificate, key_file=key)
        store.hold("held", b"1")
        timer = threading.Timer(0.05, lambda: other.set("key", b"1"))
        with_scheme = f"https://{etcd.endpoints[0]}"
        other = EtcdStore(with_scheme, "job", LONG, ca_file=ca, certificate_file=certificate, key_file=key)
        timer.start()
        assert store.watch({"key": None}, LONG) == {"key": b"1"}
        timer.join()
        store.close()
        assert not other.check(["held"])
        # As torchrun's older rendezvous calls them; its newer one has the other names.
        options = {"protocol": "https", "cacert": ca, "cert": certificate, "key": key}
        config = RendezvousConfig("etcd", etcd.endpoints[0], options=options)
        open_etcd_store(config, LONG).close()
        other.close()
        with pytest.raises(
            UsageError, match=r"do not trust each other: 127.0.0.1:\d+: .*CERTIFICATE_VERIFY_FAILED"
        ):
            EtcdStore(with_scheme, "job", LONG)
        # Of one's own certificate etcd says so when the connection stands; it may be cut before that has come.
        with pytest.raises((UsageError, TimeoutError), match=r"certificate|reset|closed|EOF|timed out"):
            EtcdStore(with_scheme, "job", SECOND, ca_file=ca)
    with (
        EtcdCluster() as plain,
        pytest.raises(TimeoutError, match="if it speaks no TLS, write http:// before"),
    ):
        EtcdStore(f"https://{plain.endpoints[0]}", "job", 2 * SECOND, ca_file=ca)
    with pytest.raises(UsageError, match="cannot use the certificates in /no/such: No such file"):
        EtcdStore("https://127.0.0.1:1", "job", 0, ca_file="/no/such")


@pytest.mark.slow
def test_the_store_goes_on_when_members_of_the_cluster_die() -> None:
    with EtcdCluster(members=3) as cluster:
        stores = [EtcdStore(cluster.endpoints, "job", LONG, lease_ns=10 * SECOND) for _ in range(6)]
        holder, watcher = stores[4:]
        holder.hold("held", b"1")
        events: list[Event] = []
        answers: list[object] = []
        threads = [
            threading.Thread(
                target=random_calls, args=(Recorder(store, f"client {index}", events.append), f"{index}", 400)
            )
            for index, store in enumerate(stores[:4])
        ]
        threads.append(threading.Thread(target=lambda: answers.append(watcher.watch({"end": None}, LONG))))
        for thread in threads:
            thread.start()
        for member in range(3):
            time.sleep(0.3)
            cluster.kill(member)
            time.sleep(0.3)
            cluster.start(member)
            EtcdStore(cluster.endpoints[member], "start", LONG).close()
        for thread in threads[:4]:
            thread.join()
        holder.set("end", b"1")
        threads[4].join()
        operations = history(events)
        assert len(operations) == 1600
        assert all(operation.returned_ns is not None for operation in operations)
        check(operations)
        assert answers == [{"end": b"1"}]
        assert holder.get("held", 0) == b"1"
        for store in stores:
            store.close()


@pytest.mark.slow
def test_a_member_that_is_stopped_is_left_for_another() -> None:
    with EtcdCluster(members=3) as cluster:
        store = EtcdStore(cluster.endpoints, "job", LONG)
        assert store.add("n", 1) == 1
        cluster.stop(store._gateway.member % 3)
        assert [store.add("n", 1) for _ in range(3)] == [2, 3, 4]
        store.close()
