"""A Slurm step and its tasks, read from the environment, and lists of hosts as Slurm compresses them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.errors import UsageError
from ronde.process.slurm import expand_hosts, find_step

# As Slurm 22.05 sets them, for the second of two nodes.
SECOND = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_CPUS_ON_NODE": "8",
}


def test_a_task_knows_its_step() -> None:
    step = find_step(SECOND)
    assert step is not None
    assert (step.job, step.task, step.tasks, step.is_one_host) == ("slurm 7.0 restart 0", 1, 2, False)
    assert (step.tasks_here, step.cpus, step.gpus, step.workers) == (1, 8, 0, 8)
    host, port = step.endpoint()
    assert host == "n1"
    assert 12_000 <= port < 32_000
    other = find_step({**SECOND, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.endpoint()[1] != port
    assert step.name(5) == "slurm 7.0 restart 0 of user 5"


@pytest.mark.parametrize(
    ("more", "workers"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "1,2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "a100:1"}, 1),
        ({"SLURM_CPUS_PER_TASK": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,16"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "nonsense"}, 8),
        ({"SLURM_CPUS_ON_NODE": ""}, 1),
    ],
)
def test_a_task_has_a_worker_for_each_gpu_or_else_processor(more: dict[str, str], workers: int) -> None:
    step = find_step({**SECOND, **more})
    assert step is not None
    assert step.workers == workers


def test_a_batch_script_is_no_task() -> None:
    assert find_step({name: value for name, value in SECOND.items() if name != "SLURM_STEP_ID"}) is None
    assert find_step({}) is None


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS=0 is invalid"):
        find_step({**SECOND, "SLURM_STEP_NUM_TASKS": "0"})
    with pytest.raises(UsageError, match="SLURM_PROCID=9 does not fit SLURM_STEP_NUM_TASKS="):
        find_step({**SECOND, "SLURM_PROCID": "9"})
    with pytest.raises(
        UsageError, match="SLURM_PROCID=2 does not fit SLURM_STEP_NUM_TASKS=2: ranks count from 0"
    ):
        find_step({**SECOND, "SLURM_PROCID": "2"})
    with pytest.raises(UsageError, match="SLURM_PROCID='x' is invalid"):
        find_step({**SECOND, "SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("a,b , c", "a b c"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1,3-4,007]", "n1 n3 n4 n007"),
        ("node[01-02,07],gpu-[1-2]-ib0", "node01 node02 node07 gpu-1-ib0 gpu-2-ib0"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("a.example,b[1].example", "a.example b1.example"),
    ],
)
def test_lists_as_slurm_writes_them(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "n[", "n]", "n[]", "n[1", "n[1-]", "n[2-1]", "n[a-b]", "n[[1]]", "n[1-99999999999]", "n[1-2]]"],
)
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of hosts as Slurm writes it"):
        expand_hosts(text)


@given(st.integers(0, 999), st.integers(1, 50), st.integers(1, 5))
def test_a_range_of_hosts_keeps_leading_zeros(first: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}}" for number in range(first, first + count)]
    assert expand_hosts(f"n[{first:0{width}}-{first + count - 1:0{width}}]") == names


@given(st.text("n[]-,019", max_size=20))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        assert expand_hosts(text)
    except UsageError:
        pass
