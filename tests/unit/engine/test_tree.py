"""The tree of hosts, and that the native side draws the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde import _native
from ronde.engine.tree import children, depth, parent, ranks_under


def test_five_hosts_two_under_each() -> None:
    assert [list(children(host, 5, 2)) for host in range(5)] == [[1, 2], [3, 4], [], [], []]
    assert [parent(host, 2) for host in range(5)] == [-1, 0, 0, 1, 1]
    assert [depth(host, 2) for host in range(5)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("arity", "deepest"), [(1, 1249), (2, 10), (8, 4), (16, 3), (1249, 1), (5000, 1)])
def test_how_deep_1250_hosts_lie(arity: int, deepest: int) -> None:
    assert max(depth(host, arity) for host in range(1250)) == deepest


@given(st.integers(1, 300), st.integers(1, 400))
def test_every_host_is_under_the_one_that_knows_it(hosts: int, arity: int) -> None:
    below = [list(children(host, hosts, arity)) for host in range(hosts)]
    assert [host for each in below for host in each] == list(range(1, hosts))
    assert all(len(each) <= arity for each in below)
    for host, each in enumerate(below):
        assert all(
            parent(child, arity) == host and depth(child, arity) > depth(host, arity) for child in each
        )


@given(st.integers(1, 300), st.integers(1, 400))
def test_the_native_tree_is_the_same(hosts: int, arity: int) -> None:
    for host in range(hosts):
        around = [parent(host, arity), *children(host, hosts, arity)]
        assert _native.tree_around(host, hosts, arity) == around


def test_whose_ranks_are_under_a_host() -> None:
    ranks_of_host = [[0, 4], [1], [2, 3], [5], [6, 7]]
    assert [list(ranks_under(host, ranks_of_host, 2)) for host in range(5)] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 5, 6, 7],
        [2, 3],
        [5],
        [6, 7],
    ]
