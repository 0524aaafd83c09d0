"""What each operation sends between hosts, against the least that any algorithm can send."""

from __future__ import annotations

import wire_bytes

HEADERS = 1.05  # the most that TCP, IP, Ethernet and Ronde's own messages add


def test_operations_between_two_hosts_send_each_byte_once() -> None:
    ratios = wire_bytes.measure(wire_bytes.Shape(num_hosts=2, ranks_per_host=3, count=3 << 18))
    assert {name: ratio for name, ratio in ratios.items() if ratio > HEADERS} == {}


def test_hosts_reduce_before_they_send() -> None:
    ratios = wire_bytes.measure(wire_bytes.Shape(num_hosts=3, ranks_per_host=2, count=3 << 18))
    del ratios["reduce"]  # its hosts share the work: each reduces a third, and sends that to the root
    assert {name: ratio for name, ratio in ratios.items() if ratio > HEADERS} == {}
