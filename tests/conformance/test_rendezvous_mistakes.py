"""The errors of a rendezvous: invalid configurations, no store, another job's key."""

from __future__ import annotations

import socket

import pytest
from tests.conformance.rendezvous_nodes import S, TestNode
from tests.ports import free_port

from ronde.errors import UsageError
from ronde.rendezvous.membership import RendezvousBroken
from ronde.rendezvous.rendezvous import RendezvousConfig, create
from ronde.settings import JobKey
from ronde.stores.server import StoreServer


def test_an_unknown_backend() -> None:
    with pytest.raises(UsageError, match="alone, c10d, etcd, etcd-v2, file, static, tcp"):
        create(RendezvousConfig("zookeeper"), JobKey.generate())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            RendezvousConfig("tcp", "localhost:1", min_nodes=3, max_nodes=2),
            "3 to 2 nodes are not a valid range",
        ),
        (RendezvousConfig("tcp"), "HOST"),
        (RendezvousConfig("tcp", "localhost:many"), "is not a TCP address"),
        (
            RendezvousConfig("tcp", "localhost:1", options={"is_host": "perhaps"}),
            "expected 1 or 0, true or false",
        ),
        (RendezvousConfig("static", "localhost:1"), "needs --node-rank"),
        (RendezvousConfig("static", "localhost:1", max_nodes=2, node_rank=0), "fixed number of nodes"),
        (RendezvousConfig("file"), "path"),
        (RendezvousConfig("etcd"), "HOST:PORT"),
        (RendezvousConfig("alone", max_nodes=2), "one node"),
    ],
)
def test_what_makes_no_sense(config: RendezvousConfig, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        create(config, JobKey.generate())


def test_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="cannot serve at"):
            create(RendezvousConfig("tcp", endpoint, options={"is_host": "1"}), JobKey.generate())


def refused(config: RendezvousConfig, key: JobKey) -> str:
    node = TestNode(config, key, "a")
    try:
        return node.expect(RendezvousBroken).reason
    finally:
        node.close()


def test_no_node_is_there() -> None:
    config = RendezvousConfig(
        "tcp", f"127.0.0.1:{free_port('127.0.0.1')}", join_timeout_ns=S, options={"is_host": "0"}
    )
    assert "Connection refused" in refused(config, JobKey.generate())


def test_an_unknown_host() -> None:
    config = RendezvousConfig("tcp", "no-such-host.invalid:1", join_timeout_ns=S)
    assert "no-such-host.invalid" in refused(config, JobKey.generate())


def test_the_wrong_key() -> None:
    server = StoreServer("tcp:127.0.0.1:0", JobKey.generate())
    config = RendezvousConfig("tcp", server.address.removeprefix("tcp:"), options={"is_host": "0"})
    assert "key" in refused(config, JobKey.generate())
    server.close()
