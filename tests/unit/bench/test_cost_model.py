"""The model of cost: what algorithms move, and whether the data plane takes the one that the model calls cheapest."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ronde.bench.collective_traffic import (
    OPERATIONS,
    JobShape,
    Traffic,
    algorithms_of,
    least_traffic,
    select_allreduce,
    traffic_of,
    usual_algorithm,
)
from ronde.bench.cost_model import Rates, least_seconds, predict, seconds_of

KIB, MIB = 1 << 10, 1 << 20
# 10 Gbit/s, with TCP; two cores that copy.
USUAL = Rates(
    memory_bytes_per_s=20e9, exchange_s=1e-6, link_bytes_per_s=1.25e9, message_s=25e-6, frame_s=5e-6
)


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32, 64])
def test_no_other_algorithm_is_much_faster_than_the_chosen_one(hosts: int) -> None:
    shape = JobShape(hosts, 1)
    for exponent in range(2, 29):
        nbytes = 1 << exponent
        names = algorithms_of("allreduce", shape)
        every = [predict("allreduce", name, shape, nbytes, USUAL) for name in names]
        best = min(every, key=lambda one: one.seconds)
        chosen = predict("allreduce", select_allreduce(shape, nbytes), shape, nbytes, USUAL)
        assert chosen.seconds < 1.6 * best.seconds, f"{chosen} instead of {best} at {nbytes} bytes"


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 4), (8, 8), (8, 64)])
def test_hosts_send_hardly_more_than_the_least_from_1_mib_on(hosts: int, ranks_per_host: int) -> None:
    shape = JobShape(hosts, ranks_per_host)
    for operation in OPERATIONS:
        sent = traffic_of(operation, usual_algorithm(operation, shape, MIB), shape, MIB).sent_bytes
        # A reduction to a root is shared among the hosts: fewer bytes for the busiest, more for all.
        least = least_traffic(operation, shape, MIB).sent_bytes * (1.34 if operation == "reduce" else 1.001)
        assert sent <= least + shape.ranks, operation


def test_a_reduction_to_a_root_on_three_hosts_trades_bytes_for_a_less_busy_root() -> None:
    shape = JobShape(3, 1)
    shared, least = (
        traffic_of("reduce", "over links", shape, 3 * MIB),
        least_traffic("reduce", shape, 3 * MIB),
    )
    assert shared.sent_bytes * 3 == least.sent_bytes * 4  # 1.33 of the least
    # The root would get twice the least in one step.
    assert shared.busiest_bytes * 3 == least.busiest_bytes * 4


def test_a_chain_relieves_the_root_of_a_large_broadcast() -> None:
    shape = JobShape(8, 1)
    assert traffic_of("broadcast", "over links", shape, MIB).busiest_bytes == 3 * MIB  # three children
    assert traffic_of("broadcast", "over links", shape, 2 * MIB).busiest_bytes == 2 * MIB
    before, after = (predict("broadcast", "over links", shape, size, USUAL) for size in (MIB, 16 * MIB))
    assert before.share < 0.4 < 0.7 < after.share


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("is_symmetric", [False, True], ids=["private", "symmetric"])
def test_nothing_is_faster_than_the_bound(operation: str, is_symmetric: bool) -> None:
    sizes = itertools.product([1, 2, 3, 5, 8], [1, 2, 3, 4, 9], [4, 4 * KIB, 100 * KIB, MIB])
    for hosts, ranks_per_host, part_bytes in sizes:
        shape = JobShape(hosts, ranks_per_host)
        nbytes = part_bytes * shape.ranks
        least = least_traffic(operation, shape, nbytes)
        for algorithm in algorithms_of(operation, shape):
            traffic = traffic_of(operation, algorithm, shape, nbytes, is_symmetric)
            case = f"{algorithm} with {part_bytes} bytes for each rank of {shape}"
            assert traffic.sent_bytes >= least.sent_bytes, case
            assert traffic.busiest_bytes >= least.busiest_bytes, case
            assert seconds_of(traffic, USUAL) >= least_seconds(operation, shape, nbytes, USUAL), case


def test_symmetric_memory_saves_the_copies() -> None:
    """In place, two ranks read and rewrite what a copy would read, fetch and write: 2 bytes for 3."""
    two = JobShape(1, 2)
    symmetric = traffic_of("allreduce", "in-host", two, 64 * MIB, is_symmetric=True)
    staged = traffic_of("allreduce", "in-host", two, 64 * MIB)
    assert symmetric == Traffic(memory_bytes=2 * 2 * 64 * MIB, exchanges=2)
    assert staged.memory_bytes == 4 * 2 * 64 * MIB


def test_seconds_add_up() -> None:
    rates = Rates(memory_bytes_per_s=100.0, exchange_s=1.0, link_bytes_per_s=10.0, message_s=2.0, frame_s=0.5)
    traffic = Traffic(busiest_bytes=30, lead_bytes=10, steps=3, frames=4, memory_bytes=500, exchanges=7)
    assert seconds_of(traffic, rates) == pytest.approx(4.0 + 6.0 + 2.0 + 5.0 + 7.0)
    in_pieces = replace(traffic, pieces=4)  # while one crosses, another moves through memory
    assert seconds_of(in_pieces, rates) == pytest.approx(4.0 / 4 + 6.0 + 2.0 + 5.0 + 7.0)
    assert seconds_of(Traffic(memory_bytes=100), Rates(memory_bytes_per_s=50.0, exchange_s=0.0)) == 2.0
