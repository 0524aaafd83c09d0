"""A Slurm step and its tasks, read from the environment."""

from __future__ import annotations

import pytest

from ronde.errors import UsageError
from ronde.process.slurm import find_step

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
    with pytest.raises(UsageError, match="SLURM_PROCID='x' is invalid"):
        find_step({**SECOND, "SLURM_PROCID": "x"})
