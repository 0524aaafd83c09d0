"""The launch plan and what it shows, with ranks as torch's elastic agent counts them, from the nodes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.topology import compute_topology
from ronde.errors import UsageError
from ronde.launch.config import WorkerSpec
from ronde.launch.launch_plan import (
    OURS,
    LaunchPlan,
    WorkerRanks,
    assign_places,
    plan_workers,
    ranks_of,
)
from ronde.rendezvous.membership import Node, Round
from ronde.settings import JobKey


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


KEY = JobKey(bytes(range(32)))


ARGV = ("/usr/bin/python", "train.py", "--name", "a b")


def node(slots: int, host: str = "a", role: str = "default") -> Node:
    return Node(f"id-{host}", host, f"10.0.0.{ord(host)}", slots, f"tcp:10.0.0.{ord(host)}:7", 29500, role)


def plan(
    workers: int,
    environment: dict[str, str] | None = None,
    columns: int | None = None,
    round: Round | None = None,
    argv: tuple[str, ...] = ARGV,
    master: tuple[str | None, int | None] = (None, None),
    virtual_local_rank: bool = False,
    mine: dict[str, str] | None = None,
) -> LaunchPlan:
    alone = Node("id", "host", "127.0.0.1", workers, "unix:@ronde-1", 29500)
    return plan_workers(
        WorkerSpec(
            argv, workers, environment=mine or {}, max_restarts=3, virtual_local_rank=virtual_local_rank
        ),
        round or Round(0, (alone,), 0, job="f00d"),
        environment=environment or {},
        cores=8,
        job_key=KEY,
        run_id="job",
        master=master,
        columns=columns,
    )


def test_workers_find_the_variables_of_torchrun_and_ours() -> None:
    worker = plan(4).workers[2]
    assert (worker.rank, worker.local_rank) == (2, 2)
    assert worker.argv == ("/usr/bin/python", "train.py", "--name", "a b")
    assert worker.environment == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
        "RONDE_JOB_ID": "f00d",
        "RONDE_ROUND": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "2",
        "HOROVOD_LOCAL_SIZE": "4",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "host",
        "OMP_NUM_THREADS": "2",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "RONDE_STORE": "unix:@ronde-1",
        "RONDE_JOB_KEY": KEY.hex(),
    }


def test_the_environment_cannot_change_a_workers_ranks() -> None:
    """The environment may be a copy from another job."""
    mine = dict.fromkeys((*OURS, "MASTER_PORT", "MINE"), "7")
    worker = plan(4, mine=mine).workers[2]
    usual = plan(4).workers[2].environment
    assert worker.environment == {**usual, "MASTER_PORT": "7", "MINE": "7"}
    own = ("MASTER_ADDR", "MASTER_PORT", "HOROVOD_HOSTNAME")
    assert usual.keys() - OURS - {*own} == {
        "OMP_NUM_THREADS",
        "PYTHONFAULTHANDLER",
        "PYTHONUNBUFFERED",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }


@pytest.mark.parametrize(("workers", "threads"), [(1, "8"), (3, "2"), (8, "1"), (100, "1")])
def test_workers_share_the_cores(workers: int, threads: str) -> None:
    assert plan(workers).workers[-1].environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, ["0", "1"]), ("4, GPU-5,6", ["4", "GPU-5"]), ("MIG-1,7", ["MIG-1", "7"])]
)
def test_a_virtual_local_rank_goes_with_a_gpu_of_its_own(visible: str | None, seen: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    workers = plan(2, environment, virtual_local_rank=True).workers
    assert [worker.environment["LOCAL_RANK"] for worker in workers] == ["0", "0"]
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == seen
    assert [worker.local_rank for worker in workers] == [0, 1]
    assert "CUDA_VISIBLE_DEVICES" not in plan(2, environment).workers[0].environment


@pytest.mark.parametrize("visible", ["3", "", "1,"])
def test_a_virtual_local_rank_needs_enough_gpus(visible: str) -> None:
    with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES={visible} names fewer"):
        plan(2, {"CUDA_VISIBLE_DEVICES": visible}, virtual_local_rank=True)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "COLUMNS"])
def test_what_the_user_has_set_stays(name: str) -> None:
    assert name not in plan(2, {name: "7"}, columns=80).workers[0].environment


def test_a_bar_has_room_for_the_longest_prefix() -> None:
    assert plan(11, columns=80).workers[0].environment["COLUMNS"] == "75"
    assert plan(2, columns=2).workers[0].environment["COLUMNS"] == "1"
    assert "COLUMNS" not in plan(2).workers[0].environment


def test_description() -> None:
    assert (
        plan(2).describe()
        == """\
2 workers on this machine

environment of every worker:
    GROUP_RANK=0
    GROUP_WORLD_SIZE=1
    HOROVOD_CROSS_RANK=0
    HOROVOD_CROSS_SIZE=1
    HOROVOD_HOSTNAME=host
    HOROVOD_LOCAL_SIZE=2
    HOROVOD_SIZE=2
    LOCAL_WORLD_SIZE=2
    MASTER_ADDR=127.0.0.1
    MASTER_PORT=29500
    OMP_NUM_THREADS=4
    PYTHONFAULTHANDLER=1
    PYTHONUNBUFFERED=1
    ROLE_NAME=default
    ROLE_WORLD_SIZE=2
    RONDE_JOB_ID=f00d
    RONDE_JOB_KEY=<hidden>
    RONDE_ROUND=0
    RONDE_STORE=unix:@ronde-1
    TORCHELASTIC_MAX_RESTARTS=3
    TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=job
    TORCHELASTIC_USE_AGENT_STORE=False
    TORCH_NCCL_ASYNC_ERROR_HANDLING=1
    WORLD_SIZE=2

rank 0:
    HOROVOD_LOCAL_RANK=0
    HOROVOD_RANK=0
    LOCAL_RANK=0
    RANK=0
    ROLE_RANK=0
    /usr/bin/python train.py --name 'a b'

rank 1:
    HOROVOD_LOCAL_RANK=1
    HOROVOD_RANK=1
    LOCAL_RANK=1
    RANK=1
    ROLE_RANK=1
    /usr/bin/python train.py --name 'a b'
"""
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_the_key_is_never_shown(workers: int) -> None:
    made = plan(workers)
    assert KEY.hex() not in made.describe() + repr(made) + str(made)


def test_workers_of_a_later_node() -> None:
    nodes = (node(2, "a"), node(3, "b", "reader"), node(2, "c"))
    made = plan(2, round=Round(4, nodes, 2, restarts=1, changes=3))
    assert [worker.rank for worker in made.workers] == [5, 6]
    found = made.workers[1].environment
    wanted = {
        "RANK": "6",
        "WORLD_SIZE": "7",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "HOROVOD_CROSS_RANK": "2",
        "HOROVOD_CROSS_SIZE": "3",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "MASTER_ADDR": nodes[0].address,
        "RONDE_STORE": nodes[0].store,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_workers_of_agents_on_one_host_share_its_local_ranks_cores_and_gpus() -> None:
    nodes = tuple(replace(node(2, host), host_id=id) for host, id in (("a", "x"), ("b", ""), ("c", "x")))
    own = {"CUDA_VISIBLE_DEVICES": "4,5"}
    every = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    made = plan(2, round=Round(0, nodes, 2), argv=("/bin/echo", "${local_rank}"))
    assert [(worker.rank, worker.local_rank, worker.index) for worker in made.workers] == [
        (4, 2, 0),
        (5, 3, 1),
    ]
    assert made.workers[1].argv == ("/bin/echo", "3")
    wanted = {
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "HOROVOD_CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "2",
    }
    found = made.workers[1].environment
    assert {name: found[name] for name in wanted} == wanted
    for environment, gpus in (({}, ["2", "3"]), (own, ["4", "5"]), (every, ["6", "7"])):
        workers = plan(2, environment, round=Round(0, nodes, 2), virtual_local_rank=True).workers
        assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == gpus


def test_a_given_master_goes_before_the_agreed_one() -> None:
    found = plan(1, master=("trainer.example", 1234)).workers[0].environment
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("trainer.example", "1234")


def test_the_local_rank_in_arguments() -> None:
    made = plan(2, argv=("/bin/echo", "--out=${local_rank}.txt", "$local_rank"))
    assert made.workers[1].argv == ("/bin/echo", "--out=1.txt", "$local_rank")


@pytest.mark.parametrize(
    ("homes", "size", "places"),
    [
        ([0, 1, 2], 3, [0, 1, 2]),
        ([0, 2, 3], 3, [0, 2, 1]),  # without the worker at 1: the last one goes into the gap
        ([0, 2, 3], 4, [0, 2, 3]),  # and back, when a new worker takes the place of the lost one
        ([3], 1, [0]),
        ([1, 1, 0], 3, [1, 2, 0]),  # a replacement has the home of a worker that has come back
        ([], 2, []),
    ],
)
def test_workers_that_continue_keep_their_first_places(
    homes: list[int], size: int, places: list[int]
) -> None:
    assert assign_places(homes, size) == places
