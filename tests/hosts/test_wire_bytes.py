"""What each operation sends between hosts, against the least that any algorithm can send and the model of cost."""

from __future__ import annotations

import pytest
import wire_bytes

HEADERS = 1.05  # the most that TCP, IP, Ethernet and Ronde's own messages add


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 3), (3, 2)])
def test_hosts_send_what_the_model_says(num_hosts: int, ranks_per_host: int) -> None:
    shape = wire_bytes.Shape(num_hosts, ranks_per_host, count=3 << 18)
    sent = wire_bytes.measure(shape)
    over_model = {name: nbytes / shape.modelled_bytes(name) for name, nbytes in sent.items()}
    assert {name: ratio for name, ratio in over_model.items() if not 1.0 <= ratio <= HEADERS} == {}
    over_least = {name: nbytes / shape.least_bytes(name) for name, nbytes in sent.items()}
    if num_hosts > 2:
        del over_least["reduce"]  # its hosts share the work: each reduces a third, and sends that to the root
    assert {name: ratio for name, ratio in over_least.items() if ratio > HEADERS} == {}
