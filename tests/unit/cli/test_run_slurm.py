"""`srun ronde run`: Slurm's variables replace options, and options override them."""

from __future__ import annotations

import pytest

from ronde.cli.run_arguments import parse_arguments
from ronde.cli.run_config import configure
from ronde.cli.run_here import Here
from ronde.errors import UsageError
from ronde.launch.config import LaunchConfig
from ronde.process.slurm import find_step

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_CPUS_ON_NODE": "8",
}


def config(line: str, **more: str) -> LaunchConfig:
    asked = parse_arguments([*line.split(), "train.py"], {})
    here = Here({}, cores=3, step=find_step({**STEP, **more}), uid=5)
    return configure(asked, ["/bin/python", "train.py"], here)


def test_each_task_is_an_agent() -> None:
    found = config("")
    meeting = found.rendezvous
    assert found.worker.slots == 8
    assert (meeting.backend, meeting.run_id) == ("tcp", "slurm 7.0 restart 0 of user 5")
    assert (meeting.min_nodes, meeting.max_nodes, meeting.node_rank) == (2, 2, 1)
    assert meeting.options == {"is_host": "false"}
    host, port = meeting.endpoint.split(":")
    assert host == "n1"
    first = config("", SLURM_PROCID="0").rendezvous
    assert first.options == {"is_host": "true"}
    assert first.endpoint == f"n1:{port}"


def test_options_go_before_what_slurm_says() -> None:
    assert config("-n 2").worker.slots == 2
    assert config("--nproc-per-node 2").worker.slots == 2
    elastic = config("--nnodes 1:2 --max-restarts 3")
    assert (elastic.rendezvous.min_nodes, elastic.rendezvous.max_nodes) == (1, 2)
    assert config("--rdzv-id mine").rendezvous.run_id == "mine"
    elsewhere = config("--nnodes 2 --rdzv-endpoint a:1")
    assert (elsewhere.rendezvous.endpoint, elsewhere.worker.slots) == ("a:1", 1)
    assert config("--standalone").rendezvous.backend == "alone"
    with pytest.raises(UsageError, match="--nnodes says 3 machines, but Slurm has started 2 tasks"):
        config("--nnodes 3")


def test_a_single_task_needs_no_rendezvous() -> None:
    alone = config("", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_STEP_NUM_NODES="1", SLURM_NODEID="0")
    assert alone.rendezvous.backend == "alone"
    assert alone.worker.slots == 8
