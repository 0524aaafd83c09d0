"""The ring probe: who probes whom, which addresses are offered in which order, and which one counts."""

from __future__ import annotations

import pytest

from ronde.launch.driver.ring import (
    HEAD_START_NS,
    TRY_NS,
    HostOffer,
    OfferedAddress,
    ProbeEdge,
    RingPlan,
    likely_first,
    plan_ring,
)

OFFER = HostOffer(
    "b",
    (
        OfferedAddress("eth0", "10.0.0.2", 1),
        OfferedAddress("eth1", "192.168.1.2", 2),
        OfferedAddress("eth1", "fd00::2", 3),
    ),
)


def edge() -> ProbeEdge:
    return ProbeEdge("a", OFFER, began_ns=0)


def test_the_first_agent_of_each_host_probes_the_next_host() -> None:
    plans = plan_ring(["x", "y", "x", "z"], ["eth0"])
    assert plans == (
        RingPlan(0, 1, True, ("eth0",)),
        RingPlan(1, 2, True, ("eth0",)),
        RingPlan(0, 1, False, ("eth0",)),
        RingPlan(2, 0, True, ("eth0",)),
    )
    assert plan_ring(["x", "x"]) == (None, None)
    assert plan_ring([]) == ()


def test_the_interface_that_leads_to_the_driver_comes_first() -> None:
    found = [("docker0", "172.17.0.1"), ("eth1", "10.0.0.1"), ("eth0", "169.254.1.1"), ("eth1", "fd00::1")]
    driver_first = [("eth1", "fd00::1"), ("eth1", "10.0.0.1"), ("docker0", "172.17.0.1")]
    assert likely_first(found, "fd00::1") == driver_first
    assert likely_first(found, "127.0.0.1") == [found[0], found[1], found[3]]
    assert likely_first([found[2]], "") == [found[2]]
    many = [(f"veth{number}", f"10.1.0.{number}") for number in range(100)]
    assert likely_first(many, "10.1.0.99")[0] == many[99]
    assert len(likely_first(many, "")) < 100


def test_the_likeliest_address_decides_at_once() -> None:
    probe = edge()
    probe.note_result(0, "", 10)
    assert probe.is_decided
    assert probe.address == "10.0.0.2"


def test_a_likelier_address_has_a_head_start() -> None:
    probe = edge()
    assert probe.deadline_ns == TRY_NS
    probe.note_result(2, "", 10)
    assert not probe.is_decided
    assert probe.deadline_ns == 10 + HEAD_START_NS
    assert probe.address == "fd00::2"
    probe.note_result(1, "", 20)
    assert probe.deadline_ns == 10 + HEAD_START_NS
    assert probe.address == "192.168.1.2"
    probe.note_result(0, "connection refused", 30)
    assert probe.is_decided
    assert probe.address == "192.168.1.2"


def test_an_answer_at_the_end_moves_no_deadline() -> None:
    probe = edge()
    probe.note_result(1, "", TRY_NS - 1)
    assert probe.deadline_ns == TRY_NS


def test_a_failed_edge_names_both_hosts_every_address_and_why() -> None:
    probe = edge()
    probe.note_result(0, "connection refused", 10)
    assert not probe.is_decided
    probe.note_result(2, "network is unreachable", 20)
    assert probe.address == ""
    assert probe.describe_failure().startswith(
        "a cannot reach b: 10.0.0.2 (eth0): connection refused; 192.168.1.2 (eth1): no answer within 5 s; "
        "fd00::2 (eth1): network is unreachable; allow TCP"
    )
    probe.note_result(1, "no route to host", 30)
    assert probe.is_decided


@pytest.mark.parametrize("addresses", [(), OFFER.addresses])
def test_nothing_is_found_before_anything_answers(addresses: tuple[OfferedAddress, ...]) -> None:
    probe = ProbeEdge("a", HostOffer("b", addresses), 0)
    assert probe.address == ""
    assert probe.is_decided == (not addresses)
    assert probe.describe_failure().startswith("a cannot reach b: ")
