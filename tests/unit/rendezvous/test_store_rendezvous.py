"""A thread of a rendezvous over a store never ends unnoticed, because no other waits in its place."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ronde.errors import TimeoutError
from ronde.rendezvous import store_session
from ronde.rendezvous.membership import Budget, Node, Notice, RendezvousBroken, RendezvousEvent, Rules
from ronde.rendezvous.store_access import FoundStore
from ronde.rendezvous.store_rendezvous import StoreRendezvous
from ronde.stores.etcd_gateway import Gateway, parse_endpoints
from ronde.stores.memory import MemoryStore
from ronde.stores.store import Store

LONG_S = 30


class Faulty(MemoryStore):
    """A store with a fault in one of its calls, for one of its clients."""

    fault = ""

    def fork(self) -> MemoryStore:
        self._check("fork")
        other = Faulty()
        other._content = self._content
        other.fault = self.fault.removeprefix("other ")
        return other

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        self._check("compare_set")
        return super().compare_set(key, expected, desired)

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        self._check("queue_pop")
        return super().queue_pop(queue, timeout_ns)

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        self._check("watch")
        return super().watch(known, timeout_ns)

    def _check(self, call: str) -> None:
        if call == self.fault:
            raise AttributeError("a fault of our own")


class Way:
    """To that store, and to no other."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def open_store(self, _: int) -> Store:
        return self.store

    def describe_node(self, node: Node) -> Node:
        return node

    def find_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> FoundStore | None:
        return None

    def redirect_nodes(self, is_here: bool) -> None:
        pass

    def open_store_at(self, address: str) -> Store:
        raise AssertionError(address)

    def serves_store(self) -> bool:
        return False

    def last_refusal(self) -> str:
        return ""

    def close(self, others: Callable[[int], None]) -> None:
        pass


@pytest.mark.parametrize("fault", ["fork", "compare_set", "watch", "other watch", "other queue_pop"])
def test_whatever_ends_a_thread_ends_the_rendezvous(fault: str) -> None:
    store = Faulty()
    store.fault = fault
    rendezvous = StoreRendezvous(Rules(2, 2), Way(store))
    rendezvous.join(Node("a", "host-a", "", 1, "", 1), Budget())
    told: list[RendezvousEvent] = []
    while not any(isinstance(event, RendezvousBroken) for event in told):
        assert select.select([rendezvous], [], [], LONG_S)[0], f"only {told} came"
        told += rendezvous.events()
    assert any("a fault of our own" in event.reason for event in told if isinstance(event, RendezvousBroken))
    rendezvous.close()


class Crowded(Way):
    """Access to a store that names another one, which refuses the node at first."""

    def __init__(self, store: Store, other: Store) -> None:
        super().__init__(store)
        self.other = other
        self.refusals = 1

    def open_store_at(self, address: str) -> Store:
        if self.refusals:
            self.refusals -= 1
            raise TimeoutError("waited 1 s for the store", operation="store", waited_ns=10**9)
        return self.other


def test_a_redirected_node_that_cannot_connect_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_session, "LONGEST_WAIT_NS", 10**7)
    store = MemoryStore()
    store.set(store_session.MOVED_KEY, b"elsewhere")
    rendezvous = StoreRendezvous(Rules(2, 2), Crowded(store, MemoryStore()))
    rendezvous.join(Node("a", "host-a", "", 1, "", 1), Budget())
    told: list[RendezvousEvent] = []
    while (
        Notice("the job goes on at elsewhere") not in told and select.select([rendezvous], [], [], LONG_S)[0]
    ):
        told += rendezvous.events()
    rendezvous.close()
    assert Notice("the job goes on at elsewhere") in told


class _Curt(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"count": "1"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_etcd_that_closes_the_connection_after_each_answer() -> None:
    with HTTPServer(("127.0.0.1", 0), _Curt) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        gateway = Gateway(parse_endpoints(f"127.0.0.1:{server.server_port}"), LONG_S * 10**9)
        for _ in range(3):
            assert gateway.post("kv/range", {"key": "AA=="}) == {"count": "1"}
        gateway.hang_up()
        server.shutdown()
        thread.join()
