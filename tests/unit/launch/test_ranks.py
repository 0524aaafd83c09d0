"""Ranks as torch's elastic agent counts them, from the nodes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.topology import compute_topology
from ronde.launch.ranks import WorkerRanks, ranks_of
from ronde.rendezvous.membership import Node


def nodes_of(*slots_and_roles: tuple[int, str]) -> list[Node]:
    return [
        Node(f"n{index}", f"host{index}", f"10.0.0.{index}", slots, "tcp:10.0.0.1:1", 1, role)
        for index, (slots, role) in enumerate(slots_and_roles)
    ]


def workers_of(nodes: list[Node]) -> list[WorkerRanks]:
    return [worker for group_rank in range(len(nodes)) for worker in ranks_of(nodes, group_rank)]


def test_one_node() -> None:
    assert ranks_of(nodes_of((2, "default")), 0) == (
        WorkerRanks(0, 2, 0, 2, 0, 1, 0, 1, "default", 0, 2),
        WorkerRanks(1, 2, 1, 2, 0, 1, 0, 1, "default", 1, 2),
    )


def test_ranks_are_cumulated_in_group_order() -> None:
    nodes = nodes_of((1, "default"), (4, "default"), (6, "default"))
    assert [worker.rank for worker in ranks_of(nodes, 2)] == [5, 6, 7, 8, 9, 10]
    assert {worker.size for worker in workers_of(nodes)} == {11}


def test_role_ranks_count_the_nodes_of_a_role() -> None:
    """The example of torch's own tests: three parameter servers between trainers."""
    nodes = nodes_of((1, "ps"), (4, "trainer"), (6, "trainer"), (1, "ps"), (2, "master"))
    told = [(worker.rank, worker.role, worker.role_rank, worker.role_size) for worker in workers_of(nodes)]
    assert told[0] == (0, "ps", 0, 2)
    assert told[1:5] == [(rank, "trainer", rank - 1, 10) for rank in range(1, 5)]
    assert told[5:11] == [(rank, "trainer", rank - 1, 10) for rank in range(5, 11)]
    assert told[11] == (11, "ps", 1, 2)
    assert told[12:] == [(12, "master", 0, 2), (13, "master", 1, 2)]


def test_the_cross_rank_counts_nodes_with_such_a_local_rank() -> None:
    nodes = nodes_of((1, "default"), (2, "default"), (2, "default"))
    last = ranks_of(nodes, 2)
    assert [(worker.cross_rank, worker.cross_size) for worker in last] == [(2, 3), (1, 2)]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["", "x", "y"])), min_size=1, max_size=6))
def test_nodes_that_share_a_host_count_as_ranks_of_a_communicator_do(shape: list[tuple[int, str]]) -> None:
    nodes = [
        replace(node, host_id=host_id)
        for node, (_, host_id) in zip(nodes_of(*((slots, "default") for slots, _ in shape)), shape)
    ]
    keys = [node.host_id or node.id for node in nodes for _ in range(node.slots)]
    for worker in workers_of(nodes):
        topology = compute_topology(worker.rank, keys, keys)
        ranks = (worker.local_rank, worker.local_size, worker.cross_rank, worker.cross_size)
        assert ranks == (
            topology.local_rank,
            topology.local_size,
            topology.cross_rank,
            topology.cross_size,
        )
        assert (worker.group_rank, worker.group_size) == (topology.host_of[worker.rank], len(set(keys)))


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("ab")), min_size=1, max_size=6))
@pytest.mark.parametrize(
    ("rank", "size", "among"),
    [
        ("rank", "size", ()),
        ("role_rank", "role_size", ("role",)),
        ("cross_rank", "cross_size", ("local_rank",)),
        ("local_rank", "local_size", ("group_rank",)),
    ],
)
def test_ranks_of_all_nodes_fit_together(
    rank: str, size: str, among: tuple[str, ...], shape: list[tuple[int, str]]
) -> None:
    groups: dict[tuple[object, ...], list[WorkerRanks]] = {}
    for worker in workers_of(nodes_of(*shape)):
        groups.setdefault(tuple(getattr(worker, name) for name in among), []).append(worker)
    for members in groups.values():
        assert [getattr(worker, rank) for worker in members] == list(range(len(members)))
        assert {getattr(worker, size) for worker in members} == {len(members)}
