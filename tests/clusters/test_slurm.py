"""A real Slurm of two nodes: `srun ronde run` needs no options, in a batch script, too."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.clusters.slurm import CPUS, Slurm, require

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(require()), reason=require()),
]

RONDE_RUN = (sys.executable, "-m", "ronde", "run")
REDUCE = """
import os

import numpy
import ronde

ronde.init()
total = ronde.world().allreduce(numpy.array([float(ronde.rank())]))[0]
node = os.environ["SLURMD_NODENAME"]
print(f"rank {ronde.rank()} of {ronde.size()} on {node}: group {os.environ['GROUP_RANK']}, sum {total:g}")
ronde.shutdown()
"""
FAIL = """
import os, sys, time

if os.environ["RANK"] == "1":
    sys.exit("not me")
time.sleep(600)
"""


# Its agent is its parent, and that one's is Slurm's own process for the step on this node.
STAY = """
import os, time

folder = os.path.dirname(__file__)
with open(f"/proc/{os.getppid()}/stat") as file:
    agent_of = file.read().rpartition(")")[2].split()[1]
node, pids = os.environ["SLURMD_NODENAME"], f"{agent_of} {os.getppid()} {os.getpid()}"
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {node}: {pids}", flush=True)
while not os.path.exists(f"{folder}/done"):
    time.sleep(0.05)
"""


# The same in place: it shows each world.
STAY_IN_PLACE = """
import os, time

import ronde.elastic

folder = os.path.dirname(__file__)
with open(f"/proc/{os.getppid()}/stat") as file:
    agent_of = file.read().rpartition(")")[2].split()[1]
pids = f"{agent_of} {os.getppid()} {os.getpid()}"


@ronde.elastic.run
def train(state):
    print(f"rank {ronde.rank()} of {ronde.size()} on {os.environ['SLURMD_NODENAME']}: {pids}", flush=True)
    while not state.is_done:
        is_done = ronde.allreduce(float(os.path.exists(f"{folder}/done")), op=ronde.Min)
        state.is_done = bool(is_done)
        state.commit()
        time.sleep(0.01)


train(ronde.elastic.ObjectState(is_done=False))
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with Slurm(["n1", "n2"]) as slurm:
        (slurm.folder / "reduce.py").write_text(REDUCE)
        (slurm.folder / "fail.py").write_text(FAIL)
        (slurm.folder / "stay.py").write_text(STAY)
        (slurm.folder / "stay_in_place.py").write_text(STAY_IN_PLACE)
        yield slurm


def said(text: str) -> list[str]:
    """Return the lines of the ranks without their prefixes."""
    return sorted(line.partition("] ")[2] for line in text.splitlines() if "rank" in line)


def test_a_job_of_two_nodes(slurm: Slurm) -> None:
    """One after the other, because it takes longer to start a Slurm than to use it."""
    # As many workers as each node has processors, told apart by nodes.
    done = slurm.run("srun", "-N2", *RONDE_RUN, str(slurm.folder / "reduce.py"))
    assert done.returncode == 0, done.stderr + slurm.logs()
    assert said(done.stdout) == [
        f"rank {rank} of {2 * CPUS} on n{rank // CPUS + 1}: group {rank // CPUS}, sum 6"
        for rank in range(2 * CPUS)
    ]

    # Several agents on a node.
    done = slurm.run("srun", "-N2", "-n4", *RONDE_RUN, "-n", "1", str(slurm.folder / "reduce.py"))
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == [
        f"rank {rank} of 4 on n{rank // 2 + 1}: group {rank}, sum 6" for rank in range(4)
    ]

    # A failing rank fails the step, and is named.
    done = slurm.run("srun", "-N2", *RONDE_RUN, "-n", "1", str(slurm.folder / "fail.py"))
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "not me" in done.stderr

    # In a batch script.
    command = shlex.join([*RONDE_RUN, "-n", "1", str(slurm.folder / "reduce.py")])
    (slurm.folder / "job.sh").write_text(f"#!/bin/sh\nsrun {command}\n")
    output = slurm.folder / "output"
    done = slurm.run("sbatch", "-N2", "--wait", f"--output={output}", str(slurm.folder / "job.sh"))
    assert done.returncode == 0, output.read_text() + done.stderr + slurm.logs()
    assert said(output.read_text()) == [
        f"rank {rank} of 2 on n{rank + 1}: group {rank}, sum 1" for rank in (0, 1)
    ]


def start(slurm: Slurm, *words: str) -> subprocess.Popen[str]:
    """Start a job of one worker on each node."""
    return subprocess.Popen(
        ["srun", "-N2", "--no-kill", *RONDE_RUN, "-n", "1", *words],
        env=slurm.environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(slurm: Slurm, step: subprocess.Popen[str], size: int) -> dict[str, list[int]]:
    """Return the processes of all ranks of the next world of this size, by node; the last one is the worker."""
    assert step.stdout is not None
    found: dict[str, list[int]] = {}
    while len(found) < size:
        match = re.search(rf"rank \d of {size} on (\w+): (.*)", step.stdout.readline())
        assert match or step.poll() is None, slurm.logs()
        if match:
            found[match[1]] = [int(pid) for pid in match[2].split()]
    return found


def take_down(slurm: Slurm, node: str, processes: list[int]) -> None:
    """Take a node down: kill its processes, and inform Slurm.

    Call this once for a Slurm, which may then believe for long that the node is in use.
    """
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has died with the one before
    done = slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=a test")
    assert done.returncode == 0, done.stderr


def lose(slurm: Slurm, node: str, *words: str) -> subprocess.Popen[str]:
    """Start a job on both nodes, and take one down."""
    step = start(slurm, *words, str(slurm.folder / "stay.py"))
    take_down(slurm, node, pids(slurm, step, 2)[node])
    return step


def test_a_lost_worker_and_then_its_node_leave_the_other_process(slurm: Slurm) -> None:
    words = ("--nnodes", "1:2", "--max-restarts", "1", str(slurm.folder / "stay_in_place.py"))
    step = start(slurm, *words)
    try:
        first = pids(slurm, step, 2)
        os.kill(first["n2"][-1], signal.SIGKILL)
        second = pids(slurm, step, 2)
        take_down(slurm, "n2", [*first["n2"][:2], *second["n2"]])
        third = pids(slurm, step, 1)
        (slurm.folder / "done").touch()
        _, err = step.communicate(timeout=60)
    finally:
        step.kill()
        step.communicate()
    assert step.returncode == 0, err
    assert first["n1"] == second["n1"] == third["n1"], err
    assert first["n2"] != second["n2"]


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_goes_down_and_the_job_does_not(slurm: Slurm, node: str) -> None:
    """With --no-kill and a range of nodes; also if the lost node served the store."""
    step = lose(slurm, node, "--nnodes", "1:2")
    try:
        assert step.stdout is not None
        other = {"n1": "n2", "n2": "n1"}[node]
        assert f"rank 0 of 1 on {other}" in step.stdout.readline()
        (slurm.folder / "done").touch()
        _, err = step.communicate(timeout=60)
        assert step.returncode == 0, err
        assert f"Node failure on {node}" in err
    finally:
        step.kill()
        step.communicate()


def test_a_node_goes_down_and_so_does_the_job(slurm: Slurm) -> None:
    """Slurm starts no task again, so the others wait only until the node counts as lost."""
    step = lose(slurm, "n2", "--rdzv-conf", "keep_alive_interval=1")
    try:
        _, err = step.communicate(timeout=60)
    finally:
        step.kill()
        step.communicate()
    assert step.returncode == 1, err
    assert re.search(
        "and nobody starts it again: 1 of 2 nodes is left, and the job needs 2 "
        r"\(--nnodes MIN:MAX, or --min-np with -H, lets it go on with fewer\)\. ",
        err,
    )
