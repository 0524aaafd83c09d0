"""The processors of each worker."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.launch.agent.starter import Core, shares, usable_machine
from ronde.launch.config import Binding


def machine(nodes: int, cores: int, threads: int = 1) -> list[Core]:
    """Processors as Linux numbers them: first one hardware thread of each core, then the others."""
    return [
        Core(node, node, core, thread * nodes * cores + node * cores + core)
        for thread in range(threads)
        for node in range(nodes)
        for core in range(cores)
    ]


@pytest.mark.parametrize(
    ("binding", "workers", "cores", "expected"),
    [
        (Binding.NONE, 2, [], [None, None]),
        (Binding.CORES, 2, machine(1, 4), [{0, 1}, {2, 3}]),
        (Binding.CORES, 2, machine(1, 2, 2), [{0, 2}, {1, 3}]),  # whole cores
        (Binding.CORES, 4, machine(2, 2, 2), [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (Binding.CORES, 3, machine(1, 2), [{0}, {0}, {1}]),
        (Binding.CORES, 3, machine(1, 8), [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
        (Binding.NUMA, 4, machine(2, 2), [{0, 1}, {0, 1}, {2, 3}, {2, 3}]),
        (Binding.NUMA, 2, machine(4, 1), [{0}, {2}]),
        (Binding.NUMA, 3, machine(1, 2), [{0, 1}] * 3),
    ],
)
def test_shares(binding: Binding, workers: int, cores: list[Core], expected: list[set[int] | None]) -> None:
    assert shares(binding, workers, cores) == expected


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 16))
def test_shares_are_equal_and_leave_no_core_idle(workers: int, nodes: int, cores: int) -> None:
    each = [share or frozenset() for share in shares(Binding.CORES, workers, machine(nodes, cores))]
    assert max(map(len, each)) - min(map(len, each)) <= 1
    assert frozenset().union(*each) == frozenset(range(nodes * cores))
    assert all(shares(Binding.NUMA, workers, machine(nodes, cores)))


def test_this_machine() -> None:
    assert {core.number for core in usable_machine()} == os.sched_getaffinity(0)
