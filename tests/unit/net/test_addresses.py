"""Addresses as texts, of services and interfaces, and names of hosts while a name server answers late or never."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.net.addresses import (
    Address,
    Answer,
    NameResolver,
    address_of_interface,
    address_towards,
    addresses_here,
    is_loopback,
    listen,
    parse_address,
    resolve,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:@name", Address(path="@name")),
        ("unix:/run/a:b", Address(path="/run/a:b")),
        ("tcp:host:80", Address(host="host", port=80)),
        ("tcp:10.0.0.1:0", Address(host="10.0.0.1", port=0)),
        ("tcp:[fe80::1%eth0]:65535", Address(host="fe80::1%eth0", port=65535)),
    ],
)
def test_parse_and_format(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:@",
        "unix:name",
        "tcp:",
        "tcp:host",
        "tcp:host:",
        "tcp::80",
        "tcp:host:65536",
        "tcp:host:-1",
    ]
    + [
        "tcp:::1:80",
        "tcp:[host]:80",
        "tcp:[]:80",
        "udp:host:80",
        "host:80",
        "unix:@" + "n" * 107,
        "unix:/a\0b",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"not an? (TCP )?address|too long"):
        parse_address(text)


@pytest.mark.parametrize(
    "text", ["tcp:127.0.0.1:0", "tcp:[::1]:0", "tcp:localhost:0", "unix:@ronde-test-listen"]
)
def test_a_listener_can_be_reached_at_the_address_it_tells(text: str) -> None:
    listener, address = listen(parse_address(text))
    endpoint = resolve(address)[0]
    with listener, socket.socket(endpoint.family) as client:
        client.settimeout(30)
        client.connect(endpoint.sockaddr)
        assert not listener.getblocking()
        assert address.is_unix or address.port > 0
        if address.host:
            assert is_loopback(str(listener.getsockname()[0]))


def test_a_listener_at_a_path(tmp_path: Path) -> None:
    listener, address = listen(Address(path=str(tmp_path / "socket")))
    with listener:
        assert Path(address.path).is_socket()


def test_a_name_of_this_machine_is_bound_where_others_reach_it() -> None:
    name = socket.gethostname()
    try:
        host = socket.gethostbyname(name)
    except OSError:
        pytest.skip("this machine does not know its own name")
    listener, _ = listen(Address(host=name))
    with listener:
        assert listener.getsockname()[0] in (
            {"0.0.0.0", "::"} if is_loopback(host) else {host, "::", "0.0.0.0"}
        )


def test_an_address_that_is_taken_or_not_ours() -> None:
    listener, address = listen(parse_address("tcp:127.0.0.1:0"))
    with (
        listener,
        pytest.raises(UsageError, match=f"cannot serve at {address}: Address already in use; end the"),
    ):
        listen(address)
    with pytest.raises(UsageError, match=r"cannot serve at tcp:192.0.2.1:0: Cannot assign"):
        listen(Address(host="192.0.2.1"))
    with pytest.raises(UsageError, match=r"cannot serve at tcp:no-such-host.invalid:0: "):
        listen(Address(host="no-such-host.invalid"))
    with pytest.raises(UsageError, match=r"cannot serve at tcp:two..dots:0: not a valid host name"):
        listen(Address(host="two..dots"))


def test_the_address_towards_a_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("::1") == "::1"
    with pytest.raises(UsageError, match=r"the host name 'no-such-host.invalid' cannot be resolved"):
        address_towards("no-such-host.invalid")
    with pytest.raises(UsageError, match=r"'two..dots' cannot be resolved \(not a valid host name\)"):
        address_towards("two..dots", 10**11)


def test_the_address_of_an_interface() -> None:
    assert address_of_interface("lo") == "127.0.0.1"
    assert address_of_interface("192.0.2.1") == "192.0.2.1"
    assert address_of_interface("fd00::1") == "fd00::1"
    assert address_of_interface("eth77,lo") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"there is no network interface 'eth77' here; there are .*\blo\b"):
        address_of_interface("eth77")


def test_the_addresses_of_this_machine_are_its_own_and_reachable() -> None:
    for address in addresses_here():
        assert not is_loopback(address)
        listener, _ = listen(Address(host=address))
        listener.close()


SOON_NS, HANGING_NS = 10**7, 60 * 10**9
HERE: Answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7))]
ELSEWHERE: Answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 7))]


class Server:
    """Gives one answer after the other, while it is `well`."""

    def __init__(self, *answers: Answer | OSError) -> None:
        self.well = threading.Event()
        self.well.set()
        self.asked = 0
        self._answers = list(answers)

    def ask(self, host: str, port: int) -> Answer:
        self.asked += 1
        self.well.wait(HANGING_NS / 1e9)
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def test_a_server_that_does_not_answer_is_asked_once_and_blocks_no_caller() -> None:
    server = Server(HERE)
    server.well.clear()
    names = NameResolver(server.ask)
    for _ in range(3):
        with pytest.raises(OSError, match="no name server has answered yet where node0 is"):
            names.find_addresses("node0", 7, SOON_NS)
    server.well.set()
    assert names.find_addresses("node0", 7, HANGING_NS) == HERE
    assert server.asked == 1


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "away"])
def test_what_was_known_counts_until_there_is_an_answer(is_silent: bool) -> None:
    away = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    server = Server(HERE, ELSEWHERE) if is_silent else Server(HERE, away, ELSEWHERE)
    names = NameResolver(server.ask)
    assert names.find_addresses("node0", 7, HANGING_NS) == HERE
    if is_silent:
        server.well.clear()
    assert names.find_addresses("node0", 7, SOON_NS if is_silent else HANGING_NS) == HERE
    server.well.set()
    assert names.find_addresses("node0", 7, HANGING_NS) == ELSEWHERE


def test_a_name_that_is_no_more_is_not_known() -> None:
    server = Server(HERE, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    names = NameResolver(server.ask)
    assert names.find_addresses("node0", 7, HANGING_NS) == HERE
    with pytest.raises(socket.gaierror, match="Name or service not known"):
        names.find_addresses("node0", 7, HANGING_NS)
