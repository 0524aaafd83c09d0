"""The launch plan and what it shows."""

from __future__ import annotations

import pytest

from ronde.launch.plan import LaunchPlan, plan_local
from ronde.settings import JobKey

KEY = JobKey(bytes(range(32)))


def plan(workers: int, environment: dict[str, str] | None = None, columns: int | None = None) -> LaunchPlan:
    return plan_local(
        ["/usr/bin/python", "train.py", "--name", "a b"],
        workers,
        environment=environment or {},
        cores=8,
        store_address="unix:@ronde-1",
        job_key=KEY,
        job_id="job",
        master_port=29500,
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
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "2",
        "HOROVOD_LOCAL_SIZE": "4",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "RONDE_STORE": "unix:@ronde-1",
        "RONDE_JOB_KEY": KEY.hex(),
    }


@pytest.mark.parametrize(("workers", "threads"), [(1, "8"), (3, "2"), (8, "1"), (100, "1")])
def test_workers_share_the_cores(workers: int, threads: str) -> None:
    assert plan(workers).workers[-1].environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "COLUMNS"])
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
    HOROVOD_LOCAL_SIZE=2
    HOROVOD_SIZE=2
    LOCAL_WORLD_SIZE=2
    MASTER_ADDR=127.0.0.1
    MASTER_PORT=29500
    OMP_NUM_THREADS=4
    PYTHONUNBUFFERED=1
    ROLE_NAME=default
    ROLE_WORLD_SIZE=2
    RONDE_JOB_KEY=<hidden>
    RONDE_STORE=unix:@ronde-1
    TORCHELASTIC_RUN_ID=job
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
