"""A real Slurm of two nodes: `srun ronde run` just works, in a batch script too."""

from __future__ import annotations

import shlex
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


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with Slurm(["n1", "n2"]) as slurm:
        (slurm.folder / "reduce.py").write_text(REDUCE)
        (slurm.folder / "fail.py").write_text(FAIL)
        yield slurm


def said(text: str) -> list[str]:
    """The lines of the ranks, without what the agents put before them."""
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
