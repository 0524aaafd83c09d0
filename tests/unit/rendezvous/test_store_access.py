"""The search of a node that has lost the store."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.ports import free_port

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import parse_address
from ronde.rendezvous import store_access
from ronde.rendezvous.membership import Node
from ronde.rendezvous.probes import ProbeResult, probe
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.rendezvous.store_access import FoundStore, TcpStoreAccess, etcd_endpoint
from ronde.stores.server import StoreServer

KEY = JobKey.generate()


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(store_access, "SILENT_NS", 0)
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, key: JobKey = KEY) -> str:
    server = StoreServer("tcp:127.0.0.1:0", key)
    stack.callback(server.close)
    return server.address


def search(stack: ExitStack, lost: str, meetings: list[str]) -> FoundStore | None:
    """Return the store that a node finds after the loss of one, if the others would meet at `meetings`."""
    config = RendezvousConfig("tcp", max_nodes=len(meetings))
    access = TcpStoreAccess(parse_address(lost), KEY, False, config)
    nodes = [
        Node(f"{place}", f"host-{place}", "127.0.0.1", 1, "", 1, meeting=meeting)
        for place, meeting in enumerate(meetings)
    ]
    rounds = iter(range(10))
    found = access.find_store(nodes, None, lambda: next(rounds, None) is not None)
    if found:
        stack.callback(found.store.close)
    return found


def test_another_job_at_the_port_of_the_lost_store_is_not_the_end(stack: ExitStack) -> None:
    stranger, other = serve(stack, JobKey.generate()), serve(stack)
    found = search(stack, stranger, [stranger, other, other])
    assert found
    assert found.store.address == other


def test_of_many_nodes_not_only_the_first_are_asked(stack: ExitStack) -> None:
    """They may be in the rack that has lost its power."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(2):  # from now on the port does not answer
        prober = stack.enter_context(socket.socket())
        prober.setblocking(False)
        prober.connect_ex(silent.getsockname())
    dark = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
    lost, other = f"tcp:127.0.0.1:{free_port('127.0.0.1')}", serve(stack)
    found = search(stack, lost, [dark] * 64 + [other] * 192)
    assert found
    assert found.store.address == other


def test_a_probe_without_descriptors_is_inconclusive() -> None:
    address = parse_address(f"tcp:127.0.0.1:{free_port('127.0.0.1')}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = os.dup(0)
    os.close(unused)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
        assert probe(address) is ProbeResult.SILENT
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("protocol", "endpoint"),
    [
        (None, "a:1,https://b:2"),
        ("https", "https://a:1,https://b:2"),
        ("HTTP", "http://a:1,https://b:2"),
    ],
)
def test_the_protocol_of_an_etcd_may_be_an_option(protocol: str | None, endpoint: str) -> None:
    options = {} if protocol is None else {"protocol": protocol}
    assert etcd_endpoint(RendezvousConfig("etcd", "a:1,https://b:2", options=options)) == endpoint


def test_an_etcd_has_no_other_protocol() -> None:
    with pytest.raises(UsageError, match="protocol=grpc is invalid: expected http or https"):
        etcd_endpoint(RendezvousConfig("etcd", "a:1", options={"protocol": "grpc"}))
