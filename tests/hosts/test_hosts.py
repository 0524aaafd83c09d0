"""`ronde.testing.hosts`: hosts that reach each other, and nothing that stays of them."""

from __future__ import annotations

import subprocess
import time
from subprocess import DEVNULL, PIPE

import pytest
from tests.hosts import ssh
from tests.ranks import programs

from ronde.errors import UsageError
from ronde.testing import hosts


def reaches(two: hosts.Hosts, address: str) -> bool:
    """Whether host 0 can open a connection to that address within two seconds."""
    code = f"import socket; socket.create_connection(({address!r}, 7777), timeout=2)"
    return (
        subprocess.run([*two.command(0), "python3", "-c", code], check=False, stderr=DEVNULL).returncode == 0
    )


def listen_on_host_1(two: hosts.Hosts) -> subprocess.Popen[bytes]:
    code = (
        "import socket; s = socket.create_server(('::', 7777), family=socket.AF_INET6, dualstack_ipv6=True);"
        "print(flush=True)\nwhile True: s.accept()"
    )
    server = subprocess.Popen([*two.command(1), "python3", "-c", code], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    return server


def test_hosts_reach_each_other_until_the_cable_is_pulled() -> None:
    with hosts.Hosts(2) as two, listen_on_host_1(two) as server:
        assert reaches(two, two.ipv4(1))
        assert reaches(two, two.ipv6(1))
        two.disconnect(1)
        assert not reaches(two, two.ipv4(1))
        two.reconnect(1)
        assert reaches(two, two.ipv4(1))
        server.kill()


def test_ranks_are_placed_host_by_host() -> None:
    with hosts.Hosts(2, ranks_per_host=2) as two:
        environs = two.run(programs.environment)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [[int(environ[name]) for name in names] for environ in environs] == [
        [0, 0, 2, 0],
        [1, 1, 2, 0],
        [2, 0, 2, 1],
        [3, 1, 2, 1],
    ]


@pytest.mark.alone  # any process that makes hosts may take it down
def test_what_a_killed_process_left_behind_is_taken_down() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    subprocess.run(["ip", "netns", "add", f"ronde-{dead.pid}-0"], check=True)
    with hosts.Hosts(1):
        pass
    assert f"ronde-{dead.pid}" not in subprocess.check_output(["ip", "netns"], text=True)


@pytest.mark.skipif(bool(ssh.require()), reason=ssh.require())
def test_sessions_that_do_not_notice_their_end_are_ended() -> None:
    with hosts.Hosts(1) as one:
        with ssh.SshServers(one) as servers:
            command = [servers.client, one.ipv4(0), "echo ready; exec cat"]
            with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == b"ready\n"
                one.disconnect(0)
                client.kill()
        deadline = time.monotonic() + 20
        while one.processes(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert one.processes(0) == []


@pytest.mark.parametrize(("count", "ranks_per_host"), [(0, 1), (10, 1), (1, 0)])
def test_impossible_numbers_are_refused(count: int, ranks_per_host: int) -> None:
    with pytest.raises(UsageError, match="the number of"):
        hosts.Hosts(count, ranks_per_host)
