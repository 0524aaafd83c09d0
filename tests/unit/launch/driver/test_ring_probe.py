"""The ring probe on one machine: who counts as the next host, and who does not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.driver.ring import HostOffer, OfferedAddress, RingPlan
from ronde.launch.driver.ring_probe import _OFFER, probe_ring
from ronde.net.addresses import addresses_here, parse_address
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient

SECOND = 10**9
KEY = JobKey.generate()


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("tcp:127.0.0.1:0", KEY)
    yield server
    server.close()


def probe(server: StoreServer, plan: RingPlan, timeout_ns: int = 20 * SECOND) -> str:
    store = StoreClient(server.address, KEY, 10 * SECOND)
    try:
        return probe_ring(store, KEY, plan, timeout_ns)
    except UsageError as error:
        return str(error)
    finally:
        store.close()


def test_all_agents_of_a_host_get_its_address(server: StoreServer) -> None:
    plans = [RingPlan(0, 1, True), RingPlan(1, 2, True), RingPlan(2, 0, True), RingPlan(1, 2, False)]
    found: dict[int, str] = {}

    def agent(number: int) -> None:
        found[number] = probe(server, plans[number])

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found.values()) <= {*addresses_here(), "127.0.0.1"}
    assert len(found) == len(plans)


def test_neither_another_service_nor_another_purpose_counts(server: StoreServer) -> None:
    web = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError), web.accept()[0] as caller:  # closed at the end
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
            caller.recv(1000)

    threading.Thread(target=answer, daemon=True).start()
    closed = socket.create_server(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in (web, closed)]
    closed.close()
    ports.append(parse_address(server.address).port)
    offer = HostOffer("far", tuple(OfferedAddress(f"eth{port}", "127.0.0.1", port) for port in ports))
    store = StoreClient(server.address, KEY, 10 * SECOND)
    store.set("ring/1/offer", _OFFER.encode(offer))
    store.close()
    said = probe(server, RingPlan(0, 1, True))
    web.close()
    foreign, refused = "another machine or service answers there", "connection refused"
    reasons = zip(ports, (foreign, refused, foreign))
    tried = "; ".join(f"127.0.0.1 (eth{port}): {reason}" for port, reason in reasons)
    assert f"{socket.gethostname()} cannot reach far: {tried}; allow TCP connections" in said


def test_a_host_that_never_comes_is_waited_for_until_the_limit(server: StoreServer) -> None:
    began_s = time.monotonic()
    said = probe(server, RingPlan(0, 1, False), SECOND // 10)
    assert " waited 0.1 s for another host to find out its address" in said
    assert time.monotonic() - began_s < 60
