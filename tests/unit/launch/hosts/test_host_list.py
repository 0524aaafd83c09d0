"""Lists of hosts: valid and invalid ones, and the placement of workers."""

from __future__ import annotations

import pytest

from ronde.errors import UsageError
from ronde.launch.hosts.host_list import (
    Host,
    describe,
    parse_discovered,
    parse_hostfile,
    parse_hosts,
    place_workers,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:3", [("a", 2), ("b", 3)]),
        ("a", [("a", 1)]),
        (" a , b.example.org:4 ", [("a", 1), ("b.example.org", 4)]),
        ("root@a:2", [("root@a", 2)]),
        ("10.0.0.1:2", [("10.0.0.1", 2)]),
        ("[fd00::1]:2,[::1]", [("fd00::1", 2), ("::1", 1)]),
        ("me@[fe80::1%eth0]:2", [("me@fe80::1%eth0", 2)]),
    ],
)
def test_lists_that_are_understood(text: str, hosts: list[tuple[str, int]]) -> None:
    assert list(parse_hosts(text)) == hosts
    assert parse_hosts(describe(parse_hosts(text))) == parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is invalid: expected hosts separated by commas"),
        ("a,,b", "is invalid: expected hosts separated by commas"),
        ("a:0", "'a:0' is invalid: expected a whole number of slots from 1"),
        ("a:", "'a:' is invalid"),
        ("a:two", "'a:two' is invalid"),
        ("a:1000000", "'a:1000000' is invalid"),
        ("fd00::1:2", "may be read in two ways: write an IPv6 address in brackets"),
        ("-oProxyCommand=x", "is not a host: write name:slots, like node1:4"),
        ("a b", "is not a host"),
        ("me@-x", "is not a host"),
        ("a:2,b,a:1", "a is listed twice: list it once, with all its slots"),
    ],
)
def test_lists_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_hosts(text)
    assert says in str(refused.value)
    assert f"-H {text}" in str(refused.value)


def test_a_hostfile() -> None:
    text = "# our cluster\n\na slots=4\nb:2   # the old one\n[fd00::1] slots=3 max_slots=9\nc\n"
    assert parse_hostfile(text, "hosts") == (("a", 4), ("b", 2), ("fd00::1", 3), ("c", 1))


def test_a_byte_order_mark_is_no_part_of_the_first_host() -> None:
    assert parse_hostfile("\ufeffa slots=4\r\nb:2\r\n", "hosts") == (("a", 4), ("b", 2))
    assert parse_hostfile("\ufeff# our cluster\nb:2\n", "hosts") == (("b", 2),)
    assert parse_discovered("\ufeffa:2\n", None, "cat hosts") == (("a", 2),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no host in hosts: write one on each line"),
        ("# nothing\n", "there is no host in hosts"),
        ("a slots=4\nb slots=x\n", "line 2 of hosts: 'slots=x' is invalid: expected a whole number of slots"),
        ("a slot=4", "line 1 of hosts: 'slot=4' is invalid: expected `host slots=4` or `host:4`"),
        ("a\n\nb\na:2", "line 1 of hosts and line 4 of hosts: a is listed twice"),
    ],
)
def test_hostfiles_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_hostfile(text, "hosts")


def test_what_a_discovery_script_prints() -> None:
    assert parse_discovered("a:2\n\nb\n", 4, "./find") == (("a", 2), ("b", 4))
    assert parse_discovered("", 4, "./find") == ()
    with pytest.raises(UsageError, match=r"line 2 of what ./find printed: 'b' does not say how many slots"):
        parse_discovered("a:2\nb\n", None, "./find")


def test_workers_fill_the_hosts_in_order() -> None:
    hosts = parse_hosts("a:2,b:2,c:2")
    assert place_workers(hosts, None) == hosts
    assert place_workers(hosts, 6) == hosts
    assert place_workers(hosts, 3) == (Host("a", 2), Host("b", 1))
    assert place_workers(hosts, 1) == (Host("a", 1),)
    with pytest.raises(UsageError) as refused:
        place_workers(hosts, 7)
    assert str(refused.value) == (
        "7 workers need 7 slots, but a:2,b:2,c:2 has 6: name more hosts or slots, or ask for at most 6 workers"
    )
