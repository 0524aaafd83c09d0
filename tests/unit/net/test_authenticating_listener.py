"""Callers that one peer can easily make share a budget, and no others."""

from __future__ import annotations

import pytest

from ronde.net.authenticating_listener import source_of


@pytest.mark.parametrize(
    ("one", "other", "is_one_source"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("fe80::1%eth0", "fe80::1%eth1", False),
        ("febf::1%eth0", "febf::2%eth0", False),
        ("fec0::1", "fec0::2", True),
    ],
)
def test_which_addresses_share_a_budget(one: str, other: str, is_one_source: bool) -> None:
    assert (source_of(one) == source_of(other)) is is_one_source
