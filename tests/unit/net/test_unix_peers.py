"""A Unix socket connects no process to another user's store or rank, not even one with the key."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
from tests.other_user import NOBODY, as_nobody

from ronde.errors import AuthenticationError, TimeoutError
from ronde.net.addresses import Address, listen, parse_address, resolve
from ronde.net.authentication import Role, authenticate, protection_of
from ronde.net.connections import Channel, Slot, open_connections
from ronde.settings import JobKey
from ronde.stores.server import STORE_PURPOSE, StoreServer
from ronde.stores.tcp import StoreClient

pytestmark = pytest.mark.root

KEY = JobKey.generate()
LONG = 30 * 10**9
# A program of its own: a fork of this process, whose threads may hold locks, could hang.
SQUATTER = """
import os, socket, sys

user = int(sys.argv[1])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[2])
    listener.listen()
    print("listening", flush=True)
    sys.stdin.readline()
    caller, _ = listener.accept()
    print("got", caller.recv(100))
"""


def shake_hands(address: str, key: JobKey) -> None:
    """Do the handshake with the right key, and trust any process that answers."""
    endpoint = resolve(parse_address(address))[0]
    with socket.socket(endpoint.family) as sock:
        sock.connect(endpoint.sockaddr)
        authenticate(
            sock, Role.CLIENT, key, STORE_PURPOSE, protection_of(sock, False), time.monotonic_ns() + LONG
        )


def join_a_rank(address: Address, key: JobKey) -> None:
    calls = {Slot(0, Channel.CONTROL): address}
    open_connections(1, ["a", "a"], [], calls, [], key, "world", time.monotonic_ns() + LONG)


def test_a_store_at_a_unix_socket_turns_other_users_away() -> None:
    server = StoreServer("unix:@ronde-test-peers", KEY)
    try:
        assert as_nobody(shake_hands, server.address, KEY).startswith(("Connection", "BrokenPipe"))
        assert "run all processes of a job as one user" in as_nobody(StoreClient, server.address, KEY, LONG)
        shake_hands(server.address, KEY)
    finally:
        server.close()


def test_a_client_believes_no_store_of_another_users() -> None:
    """The squatter has the abstract name; a client that finds it there sends it nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, str(NOBODY), "ronde-test-squatter"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as squatter:
        assert squatter.stdout
        assert squatter.stdout.readline() == "listening\n"
        with pytest.raises(AuthenticationError, match=f"user {NOBODY}"):
            StoreClient("unix:@ronde-test-squatter", KEY, LONG)
        assert squatter.communicate("\n", timeout=30)[0] == "got b''\n"


def test_a_rank_takes_no_other_user_for_a_rank() -> None:
    listener, address = listen(Address(path="@ronde-test-rank"))
    with listener:
        assert f"user {os.geteuid()}" in as_nobody(join_a_rank, address, KEY)  # it has called all the same
        soon_ns = time.monotonic_ns() + 10**9 // 2
        with pytest.raises(TimeoutError, match=rf"turned away .* of user {NOBODY}"):
            open_connections(0, ["a", "a"], [listener], {}, [Slot(1, Channel.CONTROL)], KEY, "world", soon_ns)
