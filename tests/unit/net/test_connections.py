"""Opening the connections of a communicator."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest

from ronde.job_key import JobKey
from ronde.net import connections
from ronde.net.addresses import listen, parse_address
from ronde.net.connections import Channel, Slot, open_connections


def test_a_connection_counts_although_its_other_end_has_left_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that returns first may leave at once (`wire_known`)."""
    key, hosts = JobKey.generate(), ["a", "a"]
    listener, address = listen(parse_address(f"unix:@ronde-test-{os.urandom(8).hex()}"))
    has_left = threading.Event()
    read = connections._Opening._read_handshake

    def serve() -> None:
        deadline_ns = time.monotonic_ns() + 10**10
        done = open_connections(0, hosts, [listener], {}, [Slot(1, Channel.CONTROL)], key, "it", deadline_ns)
        close_all(done)
        has_left.set()

    def read_late(opening: Any, attempt: Any, sock: socket.socket, handshake: Any) -> None:
        if handshake.wanted == 1:  # the welcome
            has_left.wait(10)
        read(opening, attempt, sock, handshake)

    def close_all(done: dict[Slot, connections.Connection]) -> None:
        for each in done.values():
            each.sock.close()

    monkeypatch.setattr(connections._Opening, "_read_handshake", read_late)
    server = threading.Thread(target=serve)
    server.start()
    with listener:
        slot = Slot(0, Channel.CONTROL)
        done = open_connections(1, hosts, [], {slot: address}, [], key, "it", time.monotonic_ns() + 10**10)
        server.join()
    assert list(done) == [slot]
    close_all(done)
